from __future__ import annotations

import io
import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from shoal.bench import results
from shoal.bench.runner import compare, turn_order
from shoal.errors import SettingsContradict


class Planted:
    """A variant whose timings are given; keeps a diary of what was asked of it, shared with its neighbors."""

    def __init__(self, name: str, step_s: Callable[[int], float], diary: list[str]) -> None:
        self.name = name
        self._step_s = step_s
        self._turn = itertools.count()
        self._diary = diary

    def start(self, n_workers: int, cores_per_worker: int) -> None:
        self._diary.append(f"start {self.name}")

    def measure(self, steps: int) -> float:
        self._diary.append(self.name)
        return self._step_s(next(self._turn))

    def stop(self) -> None:
        self._diary.append(f"stop {self.name}")


def planted(diary: list[str] | None = None, **step_s: Callable[[int], float]) -> dict[str, Planted]:
    shared = [] if diary is None else diary
    return {name: Planted(name, give, shared) for name, give in step_s.items()}


def noise(seed: int, level: float, spread: float) -> Callable[[int], float]:
    source = random.Random(seed)
    return lambda _: level * math.exp(source.gauss(0, spread))


def run(variants: dict[str, Planted], **settings: object) -> results.Result:
    return compare(
        "planted", variants, baseline="alone", n_workers=2, cores_per_worker=1, steps_per_turn=10, **settings
    )  # type: ignore[arg-type]


def test_a_planted_ratio_is_found_within_its_interval() -> None:
    result = run(planted(alone=noise(1, 0.010, 0.01), slower=noise(2, 0.013, 0.01)), rounds=15)
    found = result.against("slower")
    assert found.time_ratio.contains(1.3)
    assert found.efficiency.contains(1 / 1.3)
    assert found.extra_s.contains(0.003)
    assert found.time_ratio.half_width < 0.03
    assert found.doubts == ()


def test_noise_makes_the_comparison_worthless_and_the_result_says_so() -> None:
    result = run(planted(alone=noise(3, 0.010, 0.5), other=noise(4, 0.010, 0.5)))
    assert any("worthless" in doubt for doubt in result.against("other").doubts)
    assert any("planted, other: worthless" in line for line in results.doubt_lines([result]))


def test_a_claim_to_be_faster_that_does_not_hold_is_a_doubt() -> None:
    variants = planted(alone=noise(5, 0.01, 0.01), one=noise(6, 0.01, 0.01), other=noise(7, 0.01, 0.01))
    result = run(variants, faster=[("one", "other")])
    assert any("no difference shown" in doubt for doubt in result.against("one", "other").doubts)
    assert any("planted, one against other: no difference" in line for line in results.doubt_lines([result]))
    assert result.against("one").doubts == ()


def test_two_variants_are_compared_with_each_other_round_by_round() -> None:
    shared = [math.exp(random.Random(9).gauss(0, 0.3)) for _ in range(40)]  # what a round does to both
    variants = planted(alone=noise(8, 0.01, 0.3), one=lambda turn: shared[turn], other=lambda turn: 1.1 * shared[turn])
    result = run(variants, faster=[("one", "other")])
    assert result.against("one", "other").efficiency.value == pytest.approx(1.1)
    assert result.against("one", "other").doubts == ()
    assert [claim.variant for claim in result.claims] == ["one"]


def test_a_slow_start_of_one_variant_is_dropped_for_all_and_replaced_by_more_rounds() -> None:
    def slow_start(turn: int) -> float:
        return (0.05, 0.03, 0.02)[turn] if turn < 3 else 0.0101

    result = run(planted(alone=lambda _: 0.01, other=slow_start), rounds=9)
    assert result.warmup_rounds == 3
    assert [len(one.step_s) for one in result.measured] == [12, 12]
    assert result.of("other").summary.max == 0.0101
    assert result.against("other").time_ratio.contains(1.01)


def test_a_variant_that_never_settles_ends_the_run_with_a_doubt() -> None:
    result = run(planted(alone=lambda _: 0.01, other=lambda turn: 2.0**-turn), rounds=6, max_warmup_rounds=4)
    assert len(result.loads) == 10
    assert result.of("other").summary.count == 6
    assert any("never steady" in doubt for doubt in result.doubts)


def test_every_round_gives_each_variant_one_turn_and_the_next_round_runs_backwards() -> None:
    diary: list[str] = []
    run(planted(diary, alone=lambda _: 1.0, ddp=lambda _: 1.0, shoal=lambda _: 1.0), rounds=6)
    turns = [entry for entry in diary if " " not in entry]
    rounds = [turns[index : index + 3] for index in range(0, len(turns), 3)]
    assert all(sorted(one) == ["alone", "ddp", "shoal"] for one in rounds)
    assert all(second == first[::-1] for first, second in zip(rounds[::2], rounds[1::2], strict=True))


def test_over_a_cycle_of_rounds_every_variant_is_first_and_last_equally_often() -> None:
    names = ["a", "b", "c"]
    orders = [turn_order(names, number) for number in range(6)]
    assert (
        sorted(order[0] for order in orders) == sorted(order[-1] for order in orders) == ["a", "a", "b", "b", "c", "c"]
    )


def test_all_variants_are_up_before_the_first_turn_and_stopped_after_the_last() -> None:
    diary: list[str] = []
    run(planted(diary, alone=lambda _: 1.0, other=lambda _: 1.0), rounds=6)
    assert diary[:2] == ["start alone", "start other"]
    assert sorted(diary[-2:]) == ["stop alone", "stop other"]


def test_a_variant_that_fails_leaves_none_running() -> None:
    def fails(turn: int) -> float:
        raise RuntimeError("planted")

    diary: list[str] = []
    with pytest.raises(RuntimeError, match="planted"):
        run(planted(diary, alone=lambda _: 1.0, other=fails))
    assert {"stop alone", "stop other"} <= set(diary)


def test_a_turn_gets_as_many_steps_as_the_baseline_does_in_its_time() -> None:
    result = compare(
        "calibrated",
        planted(alone=lambda turn: 0.02 if turn else 0.2, other=lambda _: 0.02),
        baseline="alone",
        n_workers=1,
        cores_per_worker=1,
        turn_s=1.0,
    )
    assert result.steps_per_turn == 50


def test_too_few_rounds_and_unknown_names_are_refused_before_anything_starts() -> None:
    diary: list[str] = []
    with pytest.raises(SettingsContradict, match="at least 6"):
        run(planted(diary, alone=lambda _: 1.0), rounds=5)
    with pytest.raises(SettingsContradict, match="no variant is named other"):
        run(planted(diary, alone=lambda _: 1.0), faster=[("alone", "other")])
    assert diary == []


def test_a_result_becomes_json_and_a_table(tmp_path: Path) -> None:
    result = run(planted(alone=noise(7, 0.010, 0.01), other=noise(8, 0.020, 0.01)))
    results.write_json(tmp_path / "out.json", {"results": [results.as_json(result)]})
    read = json.loads((tmp_path / "out.json").read_text())["results"][0]
    assert read["comparisons"][0]["time_ratio"]["value"] == result.against("other").time_ratio.value
    assert len(read["loads"]) == len(read["measured"][0]["step_s"])
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(results.table([result]))
    assert "planted" in console.export_text()
