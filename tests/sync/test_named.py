"""Which named operations are ready, whatever the order in which they are asked for."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from shoal.sync.named import Request, Table


def reduced(name: str, shape: tuple[int, ...] = (2,), dtype: str = "float32", op: str = "sum") -> Request:
    return Request(name, "allreduce", dtype, shape, 4 * shape[0], reduce=op)


def test_nothing_is_decided_before_all_have_asked_and_who_is_missing_is_known() -> None:
    table = Table(["a", "b", "c"])
    table.submit(0, reduced("x"))
    table.submit(2, reduced("x"))
    assert table.decide() == []
    assert table.missing("x") == ["b"]
    table.submit(1, reduced("x"))
    assert [it.names for it in table.decide()] == [("x",)]
    assert table.missing("x") == []
    assert table.decide() == []


def test_small_sums_of_one_kind_go_together_up_to_a_bound_and_large_ones_alone() -> None:
    table = Table(["a"], fused_bytes=40)
    for name, length in [("a", 4), ("b", 5), ("c", 3), ("large", 11), ("d", 1)]:
        table.submit(0, reduced(name, (length,)))
    table.submit(0, reduced("e", dtype="float64"))
    table.submit(0, reduced("f", op="max"))
    decided = [it.names for it in table.decide()]
    assert sorted(decided) == [("a", "b"), ("c", "d"), ("e",), ("f",), ("large",)]


def test_what_differs_is_said_with_both_values_and_both_workers() -> None:
    for one, other, words in [
        (reduced("x"), reduced("x", (3,)), ["float32 (2,)", "float32 (3,)"]),
        (reduced("x"), reduced("x", dtype="int64"), ["float32 (2,)", "int64 (2,)"]),
        (reduced("x"), reduced("x", op="max"), ["allreduce sum", "allreduce max"]),
        (reduced("x"), Request("x", "barrier"), ["allreduce", "barrier"]),
        (Request("x", "broadcast", "int8", (1,), root=0), Request("x", "broadcast", "int8", (1,), root=1),
         ["from rank 0", "from rank 1"]),
        (Request("x", "allgather", "int8", (1, 4)), Request("x", "allgather", "int8", (2, 5)), ["(1, 4)", "(2, 5)"]),
    ]:  # fmt: skip
        table = Table(["w4", "w7"])
        table.submit(0, one)
        table.submit(1, other)
        (decision,) = table.decide()
        assert all(it in decision.problem for it in [*words, "w4", "w7", "'x'"]), decision.problem
        assert "\n" not in decision.problem
        table.submit(0, one)  # the name is free again
        table.submit(1, one)
        assert not table.decide()[0].problem


@given(names=st.lists(st.text(max_size=5), unique=True, max_size=12), size=st.integers(1, 4), seed=st.integers(0, 99))
def test_every_name_is_decided_once_whatever_the_orders(names: list[str], size: int, seed: int) -> None:
    table, rng = Table([f"w{rank}" for rank in range(size)]), random.Random(seed)
    asked = [(rank, name) for rank in range(size) for name in names]
    rng.shuffle(asked)
    decided: list[str] = []
    for rank, name in asked:
        table.submit(rank, reduced(name))
        if rng.random() < 0.3:
            decided += [it for decision in table.decide() for it in decision.names]
    decided += [it for decision in table.decide() for it in decision.names]
    assert sorted(decided) == sorted(names)
