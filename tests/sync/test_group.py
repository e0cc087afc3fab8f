"""Waits: they block without burning a core, and every one of them can be released."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from shoal.control.generation import Generation, Member
from shoal.errors import Changed
from shoal.sync import words as w
from shoal.sync.group import Group, acknowledge
from shoal.sync.notice import Notice
from shoal.sync.words import Words, tag
from tests.sync.harness import SharedMemory

MEMBERS = tuple(Member(f"w{slot}", slot, "here") for slot in range(3))
HELD_S = 0.4


def group_of(memory: SharedMemory, slot: int, generation: Generation | None = None) -> tuple[Group, Notice]:
    words = Words(memory)
    notice = Notice(words)
    return Group(words, notice, generation or Generation(1, MEMBERS[:2]), f"w{slot}", spin=True), notice


def in_thread(do: Callable[[], object]) -> tuple[threading.Thread, list[BaseException | None], list[float]]:
    ended: list[BaseException | None] = []
    cpu_s: list[float] = []

    def body() -> None:
        began_s = time.thread_time()
        try:
            do()
            ended.append(None)
        except BaseException as problem:
            ended.append(problem)
        cpu_s.append(time.thread_time() - began_s)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, ended, cpu_s


def until_it_waits(notice: Notice) -> None:
    deadline_s = time.monotonic() + 10
    while notice.awaited is None:
        assert time.monotonic() < deadline_s, "it does not wait"


def test_a_worker_that_waits_uses_no_core() -> None:
    memory = SharedMemory()
    (one, notice), (other, _) = group_of(memory, 0), group_of(memory, 1)
    waiting, ended, cpu_s = in_thread(one.ready)
    until_it_waits(notice)
    assert not waiting.join(HELD_S)  # type: ignore[func-returns-value]
    assert waiting.is_alive()
    other.words.put(1, w.READY, tag(1, 1))
    other.words.ring(1)
    waiting.join(10)
    assert ended == [None]
    assert cpu_s[0] < HELD_S / 10


def test_news_of_a_death_ends_a_wait_that_nobody_will_ring() -> None:
    memory = SharedMemory()
    group, notice = group_of(memory, 0)
    waiting, ended, _ = in_thread(group.ready)
    until_it_waits(notice)
    notice.tell(Generation(2, MEMBERS[:1], fault=True))
    waiting.join(10)
    assert isinstance(ended[0], Changed)


def test_a_neighbor_that_has_left_the_generation_ends_the_wait_for_it() -> None:
    memory = SharedMemory()
    (one, notice), (other, _) = group_of(memory, 0), group_of(memory, 1)
    waiting, ended, _ = in_thread(one.ready)
    until_it_waits(notice)
    acknowledge(other.words, 1, Generation(2, MEMBERS))
    waiting.join(10)
    assert isinstance(ended[0], Changed)


def test_a_planned_generation_does_not_end_the_wait_of_a_step() -> None:
    memory = SharedMemory()
    (one, notice), (other, _) = group_of(memory, 0), group_of(memory, 1)
    waiting, ended, _ = in_thread(one.ready)
    until_it_waits(notice)
    notice.tell(Generation(2, MEMBERS))
    waiting.join(HELD_S)
    assert waiting.is_alive()
    other.words.put(1, w.READY, tag(1, 1))
    other.words.ring(1)
    waiting.join(10)
    assert ended == [None]


def test_entering_waits_for_leavers_and_is_given_up_for_a_newer_generation() -> None:
    memory = SharedMemory()
    group, notice = group_of(memory, 0, Generation(3, MEMBERS[:1], leavers=MEMBERS[2:]))
    waiting, ended, _ = in_thread(group.enter)
    until_it_waits(notice)
    assert notice.awaited_id == "w2"  # of the generation that is being entered: the coordinator asks after this one
    notice.tell(Generation(4, MEMBERS[:1]))
    waiting.join(10)
    assert isinstance(ended[0], Changed)


@pytest.mark.parametrize("word", [w.READY, w.DONE])
def test_a_word_of_another_generation_with_the_same_number_is_not_taken(word: int) -> None:
    memory = SharedMemory()
    (one, notice), (other, _) = group_of(memory, 0, Generation(7, MEMBERS[:2])), group_of(memory, 1)
    other.words.put(1, word, tag(6, 1))
    waiting, ended, _ = in_thread(one.ready if word == w.READY else one.commit)
    until_it_waits(notice)
    notice.tell(Generation(8, MEMBERS[:1], fault=True))
    waiting.join(10)
    assert isinstance(ended[0], Changed)
    assert one.words.commit == 0
