"""Who has a connection to whom, in generations of any shape."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.control.generation import Generation, Member
from shoal.sync.hosts import Places

HOMES = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=9)


def placed(homes: list[str], members: int) -> Places:
    listed = [Member(f"w{slot}", slot, host, f"127.0.0.1:{1000 + slot}") for slot, host in enumerate(homes)]
    return Places(Generation(1, tuple(listed[:members]), tuple(listed[members:])))


@given(HOMES, st.integers(0, 9))
def test_a_connection_has_two_ends_on_different_hosts(homes: list[str], members: int) -> None:
    places = placed(homes, members)
    for slot in range(len(homes)):
        for other in places.connects(slot):
            assert slot in places.connects(other)
            assert homes[slot] != homes[other]


@given(HOMES, st.integers(1, 9))
def test_everybody_is_connected_to_whoever_leads_another_host(homes: list[str], members: int) -> None:
    places = placed(homes, members)
    for slot, home in enumerate(homes):
        assert {leader for host, leader in places.leaders.items() if host != home} <= places.connects(slot).keys()


@given(HOMES)
def test_where_all_leave_nobody_waits_for_any_but_the_first(homes: list[str]) -> None:
    places = placed(homes, 0)
    for slot in range(1, len(homes)):
        assert places.connects(slot).keys() <= {0}
