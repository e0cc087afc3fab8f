"""Checkpoints on disk: what is in them, what is damaged, and what a model takes from them."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal import checkpoints
from shoal.checkpoints import Every
from shoal.errors import CheckpointUnusable, SettingsContradict
from shoal.sync.record import Record
from shoal.sync.replica import Replica
from shoal.sync.sync import State
from shoal.train.checkpoint import Moment, Restored, Saver, start_from, take_weights


def net(hidden: int = 8) -> nn.Sequential:
    torch.manual_seed(hidden)
    return nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 2))


def state(model: nn.Module) -> State:
    kept = {f"optimizer/{name}/momentum_buffer": torch.randn_like(it) for name, it in model.named_parameters()}
    return State(dict(model.state_dict()), kept)


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def __call__(self, kind: str, text: str, fields: dict[str, Any]) -> None:
        self.events.append((kind, text, fields))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]


def take(folder: Path, step: int, model: nn.Module, keep: int = 3, generation: int = 1, seq: int | None = None) -> Told:
    told = Told()
    saver = Saver(folder, Every(), keep, 0.0, told)
    saver.take(
        state(model),
        Moment(seq or step + 1, generation, Record(step=step, epoch=2, samples=64 * step), b'[[{"lr": 0.2}], []]'),
    )
    saver.finish()
    return told


def test_a_checkpoint_gives_back_the_model_the_optimizer_and_the_record(tmp_path: Path) -> None:
    trained, other = net(), net()
    for tensor in (*trained.parameters(), *trained.buffers()):
        tensor.data.add_(1)
    told = take(tmp_path, 7, trained)
    assert told.kinds == ["checkpointed"]
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    restored = Restored(checkpoints.listed(tmp_path)[0], other, optimizer)
    restored.apply_training(Replica(other, optimizer))
    assert (restored.seq, restored.record.step, restored.record.epoch) == (8, 7, 2)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert all("momentum_buffer" in optimizer.state[parameter] for parameter in other.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool])
def test_every_dtype_and_layout_is_read_by_other_programs_too(tmp_path: Path, dtype: torch.dtype) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    values = torch.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4).remainder(2).to(dtype)
    tensors = {"channels_last": values.contiguous(memory_format=torch.channels_last), "one": values[0, 0, 0, 0]}
    tensors["none"] = torch.empty(0, 3, dtype=dtype)
    saver = Saver(tmp_path, Every(), 3, 0.0, Told())
    saver.take(State(tensors, {}), Moment(1, 1, Record(step=1), b"[]"))
    saver.finish()
    read = load_file(checkpoints.listed(tmp_path)[0] / checkpoints.MODEL)
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor), name
        assert read[name].dtype == dtype


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    f"{name} {what}": (lambda path, name=name, act=act: act(path / name))
    for name in (checkpoints.MODEL, checkpoints.TRAINING, checkpoints.MANIFEST)
    for what, act in {
        "is missing": lambda file: file.unlink(),
        "is empty": lambda file: file.write_bytes(b""),
        "lacks its last byte": lambda file: file.write_bytes(file.read_bytes()[:-1]),
        "lacks its second half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        "has a byte more": lambda file: file.write_bytes(file.read_bytes() + b"x"),
        "has another first byte": lambda file: _flip(file, 0),
        "has another byte in the middle": lambda file: _flip(file, file.stat().st_size // 2),
        "has another last byte": lambda file: _flip(file, -1),
    }.items()
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    take(tmp_path, 1, net())
    take(tmp_path, 2, net())
    DAMAGE[damage](tmp_path / "step-000000002-g1")
    newest, lines = checkpoints.newest_whole(tmp_path)
    assert newest is not None
    assert newest.step == 1
    assert len(lines) == 1
    assert lines[0].startswith(f"checkpoint step-000000002-g1 is damaged: {damage.split()[0]}")


def test_only_the_newest_are_kept_and_leftovers_of_the_dead_go(tmp_path: Path) -> None:
    (tmp_path / ".draft-999999999-step-000000001-g1").mkdir()
    for step in (1, 2, 3, 4):
        take(tmp_path, step, net(), keep=2)
    take(tmp_path, 2, net(), keep=2, generation=5)  # a job that went on from step 1 is newer, whatever its step
    assert [path.name for path in checkpoints.listed(tmp_path)] == ["step-000000002-g5", "step-000000004-g1"]
    assert not list(tmp_path.glob(".*"))


def test_an_edit_after_a_step_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    before, after = net(), net()
    with torch.no_grad():
        next(after.parameters()).fill_(7.0)
    take(tmp_path, 4, before, seq=5)
    take(tmp_path, 4, after, seq=6)
    take(tmp_path, 4, after, seq=6)  # once more, by whoever leaves last
    newest, damaged = checkpoints.newest_whole(tmp_path)
    assert newest is not None
    assert (newest.step, newest.seq, damaged) == (4, 6, [])
    assert len(checkpoints.listed(tmp_path)) == 2
    take(tmp_path, 5, before, seq=7)
    assert [checkpoints.check(path).seq for path in checkpoints.listed(tmp_path)] == [7, 6, 5]


def test_one_that_is_being_written_is_waited_for_and_one_of_the_dead_is_not(tmp_path: Path) -> None:
    assert not checkpoints.being_written(tmp_path / "nowhere")
    (tmp_path / ".draft-999999999-step-000000001-g1").mkdir()
    take(tmp_path, 1, net())
    assert not checkpoints.being_written(tmp_path)
    (tmp_path / f".draft-{os.getpid()}-step-000000002-g1").mkdir()
    assert checkpoints.being_written(tmp_path)


def test_a_full_disk_costs_the_checkpoint_only(tmp_path: Path) -> None:
    take(tmp_path, 1, net())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        told = take(tmp_path, 2, net())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert told.kinds == ["checkpoint_failed"]
    assert "no checkpoint of step 2" in told.events[0][1]
    newest, lines = checkpoints.newest_whole(tmp_path)
    assert newest is not None
    assert newest.step == 1
    assert not lines
    assert not list(tmp_path.glob(".*"))


def test_a_step_that_would_overwrite_what_is_being_copied_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.train import checkpoint

    may_copy, copied = threading.Event(), checkpoint._copied

    def slow(state: State) -> Any:
        may_copy.wait()
        return copied(state)

    monkeypatch.setattr(checkpoint, "_copied", slow)
    saver = Saver(tmp_path, Every(), 3, 0.0, Told())
    saver.take(state(net()), Moment(10, 1, Record(step=9), b"[]"))
    saver.before(11)  # the other buffer: nothing to wait for
    passed = threading.Event()
    thread = threading.Thread(target=lambda: (saver.before(12), passed.set()))
    thread.start()
    assert not passed.wait(0.05)
    may_copy.set()
    thread.join()
    assert passed.is_set()
    saver.finish()


def test_weights_of_another_model_are_refused_with_both_shapes_and_none_is_taken(tmp_path: Path) -> None:
    take(tmp_path / "checkpoints", 1, net(8))
    wide = net(9)
    before = {name: tensor.clone() for name, tensor in wide.state_dict().items()}
    with pytest.raises(CheckpointUnusable, match=r"0\.weight is 8×4 there and 9×4 in the model"):
        start_from(tmp_path, wide)
    assert all(torch.equal(tensor, before[name]) for name, tensor in wide.state_dict().items())
    with pytest.raises(CheckpointUnusable, match=r"it has no 1\.weight"):
        take_weights(net(), {}, "here")
    with pytest.raises(CheckpointUnusable, match="has no weights"):
        start_from(tmp_path / "checkpoints", net())
    start_from(tmp_path / "checkpoints" / "step-000000001-g1" / checkpoints.MODEL, net(8))


def test_when_a_checkpoint_is_due(tmp_path: Path) -> None:
    by_steps = Saver(tmp_path, Every(steps=10), 3, 0.0, Told())
    assert [step for step in range(13, 25) if by_steps.due(step)] == [20, 21, 22, 23, 24]
    by_steps.take(state(net()), Moment(21, 1, Record(step=20), b"[]"))
    by_steps.finish()
    assert not by_steps.due(29)
    assert by_steps.due(30)
    never = Saver(tmp_path, Every(), 3, 0.0, Told())
    assert not never.due(1000)
    never.ask()
    assert never.due(1000)
    assert Saver(tmp_path / "new", Every(seconds=60), 3, 0.0, Told()).due(1)  # the job began long ago
    assert not Saver(tmp_path, Every(seconds=60), 3, 0.0, Told()).due(1)  # somebody has just written one


@pytest.mark.parametrize(
    ("text", "every"), [("500", Every(500)), ("30s", Every(None, 30)), ("1.5m", Every(None, 90)), ("off", Every())]
)
def test_how_often_is_said(text: str, every: Every) -> None:
    assert Every.parse(text) == every


@pytest.mark.parametrize("text", ["", "0", "-1", "2.5", "10x", "m"])
def test_what_is_no_time_and_no_number_is_refused(text: str) -> None:
    with pytest.raises(SettingsContradict):
        Every.parse(text)
