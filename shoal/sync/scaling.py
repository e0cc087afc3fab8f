"""Loss scaling for float16: the loss is multiplied so that small gradients do not vanish, and less where large ones
overflow."""

from __future__ import annotations

from typing import Any

from shoal import errors


class LossScaler:
    """As torch's GradScaler, in numbers of Python: what it does next follows from the commits, so it is the same on
    every worker, a newcomer's too, and a step that comes again has not counted.

    An overflow is one of the summed gradient: such a step leaves the parameters as they are, on all workers.
    """

    def __init__(
        self, scale: float = 2.0**16, *, growth: float = 2.0, backoff: float = 0.5, growth_interval: int = 2000
    ) -> None:
        if scale <= 0 or growth <= 1 or not 0 < backoff < 1 or growth_interval < 1:
            raise errors.SettingsContradict(
                f"LossScaler({scale}, growth={growth}, backoff={backoff}, growth_interval={growth_interval}): scale is "
                "above 0, growth above 1, backoff between 0 and 1, growth_interval 1 or more"
            )
        self.scale = scale
        self._growth, self._backoff, self._interval = growth, backoff, growth_interval
        self._since = 0  # steps without an overflow
        self._overflow: bool | None = None  # of the newest step, until the next one begins

    def found(self, *, overflow: bool) -> None:
        """What the step that is about to be committed came to."""
        self._overflow = overflow

    def forget(self) -> None:
        """It was not committed."""
        self._overflow = None

    def move_on(self) -> None:
        """A step begins: the one before, if it was told, is committed."""
        overflow, self._overflow = self._overflow, None
        if overflow is None:
            return
        self._since = 0 if overflow else self._since + 1
        if overflow:
            self.scale *= self._backoff
        elif self._since == self._interval:
            self.scale, self._since = self.scale * self._growth, 0

    def state_dict(self) -> dict[str, Any]:
        """Part of every commit's record, as schedulers are."""
        return {"scale": self.scale, "since": self._since, "overflow": self._overflow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self._since, self._overflow = float(state["scale"]), int(state["since"]), state["overflow"]
