"""How long anything in the control plane may take: one setting, the heartbeat budget, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shoal.errors import SettingsContradict

SHORTEST_BUDGET_S = 0.5


@dataclass(frozen=True, init=False)
class Timeouts:
    """`budget_s` is how long an awaited worker may show no sign of life. The rest derives from it unless given.

    Raises SettingsContradict when the values cannot all hold.
    """

    budget_s: float
    beat_s: float  # between two beats; a worker blocked for longer reports whom it waits for
    probe_s: float  # between two looks at a suspect's CPU time
    backoff_first_s: float  # before the first attempt to reconnect
    backoff_max_s: float  # the longest pause between two attempts
    join_s: float  # from the start of a worker until it is welcomed
    drain_s: float  # from being asked to leave until the launcher kills
    command_s: float  # for the coordinator's answer to a command

    def __init__(
        self,
        budget_s: float = 5.0,
        beat_s: float | None = None,
        probe_s: float | None = None,
        backoff_first_s: float | None = None,
        backoff_max_s: float | None = None,
        join_s: float | None = None,
        drain_s: float | None = None,
        command_s: float | None = None,
    ) -> None:
        def settle(name: str, given: float | None, derived: float) -> None:
            object.__setattr__(self, name, derived if given is None else given)

        settle("budget_s", budget_s, budget_s)
        settle("beat_s", beat_s, budget_s / 5)
        settle("probe_s", probe_s, budget_s / 10)
        settle("backoff_first_s", backoff_first_s, budget_s / 100)
        settle("backoff_max_s", backoff_max_s, budget_s / 5)
        settle("join_s", join_s, 6 * budget_s)
        settle("drain_s", drain_s, 4 * budget_s)
        settle("command_s", command_s, 2 * budget_s)
        self._check()

    def _check(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise SettingsContradict(f"{field.name} is {value}; every timeout is a positive number of seconds")
        if self.budget_s < SHORTEST_BUDGET_S:
            raise SettingsContradict(
                f"budget_s is {self.budget_s:g} s; below {SHORTEST_BUDGET_S} s a busy worker looks dead, raise --budget"
            )
        _below("beat_s", self.beat_s, "half of budget_s", self.budget_s / 2)
        _below("probe_s", self.probe_s, "half of budget_s", self.budget_s / 2)
        _below("backoff_max_s", self.backoff_max_s, "budget_s", self.budget_s)
        _below("backoff_first_s", self.backoff_first_s, "budget_s", self.budget_s)
        if self.backoff_first_s > self.backoff_max_s:
            raise SettingsContradict(
                f"backoff_first_s is {self.backoff_first_s:g} s, above backoff_max_s {self.backoff_max_s:g} s; "
                "lower the first or raise the second"
            )
        if self.join_s < self.budget_s:
            raise SettingsContradict(
                f"join_s is {self.join_s:g} s, below budget_s {self.budget_s:g} s; raise it or leave it out"
            )


def _below(name: str, value_s: float, limit_name: str, limit_s: float) -> None:
    if value_s >= limit_s:
        raise SettingsContradict(
            f"{name} is {value_s:g} s, it must stay below {limit_name} ({limit_s:g} s); lower it or raise --budget"
        )
