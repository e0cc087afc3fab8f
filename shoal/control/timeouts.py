"""How long anything in the control plane may take: one setting, the heartbeat budget, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import SettingsContradict

DEFAULT_BUDGET_S = 5.0
SHORTEST_BUDGET_S = 0.5


@dataclass(frozen=True, init=False)
class Timeouts:
    """`budget_s` is how long an awaited worker may show no sign of life. The rest derives from it unless given.

    Raises SettingsContradict when the values cannot all hold.
    """

    budget_s: float
    beat_s: float  # between two beats; a worker blocked for longer reports whom it waits for
    probe_s: float  # between two looks at a suspect's CPU time
    join_s: float  # from the start of a worker until it is welcomed

    def __init__(
        self,
        budget_s: float = DEFAULT_BUDGET_S,
        beat_s: float | None = None,
        probe_s: float | None = None,
        join_s: float | None = None,
    ) -> None:
        def settle(name: str, value_s: float) -> None:
            if not 0 < value_s < float("inf"):
                called = "--budget" if name == "budget_s" else name
                raise SettingsContradict(f"{called} is {value_s:g}; it must be a positive number of seconds")
            object.__setattr__(self, name, value_s)

        settle("budget_s", budget_s)
        settle("beat_s", budget_s / 5 if beat_s is None else beat_s)
        settle("probe_s", budget_s / 10 if probe_s is None else probe_s)
        settle("join_s", 6 * budget_s if join_s is None else join_s)
        self._check()

    @property
    def backoff_first_s(self) -> float:
        """Before the first attempt to reconnect."""
        return self.budget_s / 100

    @property
    def backoff_max_s(self) -> float:
        """The longest pause between two attempts."""
        return self.budget_s / 5

    @property
    def drain_s(self) -> float:
        """From being asked to leave until the launcher kills."""
        return 4 * self.budget_s

    @property
    def save_s(self) -> float:
        """After that, for a last checkpoint that is being written."""
        return 100 * self.budget_s

    @property
    def command_s(self) -> float:
        """For the coordinator's answer to a command."""
        return 2 * self.budget_s

    @property
    def deserted_s(self) -> float:
        """Without a word from the job, until a host takes it for over."""
        return 60 * self.budget_s

    @property
    def longest_rest_s(self) -> float:
        """Of a host that others do not reach, before it is tried again."""
        return 60 * self.budget_s

    @property
    def cut_off_s(self) -> float:
        """Without a word from the other end of a pipe between hosts, until it counts as cut."""
        return 3 * self.budget_s

    @property
    def handshake_s(self) -> float:
        """From a connection until the other end has said who it is."""
        return 2 * self.budget_s

    @property
    def idle_s(self) -> float:
        """For a connection that nothing is asked on, and until one is taken for broken."""
        return 4 * self.budget_s

    def _check(self) -> None:
        if self.budget_s < SHORTEST_BUDGET_S:
            raise SettingsContradict(
                f"--budget is {self.budget_s:g} s; below {SHORTEST_BUDGET_S} s a busy worker looks dead, raise it"
            )
        _below("beat_s", self.beat_s, "half of --budget", self.budget_s / 2)
        _below("probe_s", self.probe_s, "half of --budget", self.budget_s / 2)
        if self.join_s < self.budget_s:
            raise SettingsContradict(
                f"join_s is {self.join_s:g} s, below --budget, {self.budget_s:g} s; raise it or leave it out"
            )


def _below(name: str, value_s: float, limit_name: str, limit_s: float) -> None:
    if value_s >= limit_s:
        raise SettingsContradict(
            f"{name} is {value_s:g} s, it must stay below {limit_name} ({limit_s:g} s); lower it or raise --budget"
        )
