"""Who is served: whoever has the token, for as long as what it says can be meant."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from shoal.control import bounds, protocol
from shoal.control.bounds import BadMessage
from shoal.control.coordinator.telling import Outbox

_log = logging.getLogger("shoal.coordinator")


class Streams:
    """`term`: the coordinator's, which each stream begins with. `beat_s`: how long a last word may take."""

    def __init__(self, token: str, term: int, beat_s: float) -> None:
        self._token, self._term, self._beat_s = token, term, beat_s

    async def converse(
        self,
        requests: AsyncIterator[bytes],
        context: Any,
        message_class: Any,
        streams: dict[str, Outbox],
        first: str,
        opened: Callable[[Any, Outbox], str],
        heard: Callable[[str, str, Any], None],
        closed: Callable[[str], None] = lambda whose: None,
    ) -> None:
        """Serve one stream to its end. Its `first` message says whose it is, which `opened` returns; the stream takes
        the place of an older one of the same in `streams`, and `closed` is called unless another has taken its own.
        Nobody's (an empty name) has no place there: nothing more is said to it. A message that cannot be meant ends
        it."""
        await self.admit(context)
        await context.send_initial_metadata(protocol.term_to_wire(self._term))
        outbox = Outbox()
        whose = ""
        sending = asyncio.create_task(outbox.send_all(context))
        try:
            async for message in requests:
                kind, body = bounds.parse(message_class, message)
                if kind == first and not whose:
                    whose = opened(body, outbox)
                    if whose:
                        if (older := streams.get(whose)) is not None:
                            older.end()
                        streams[whose] = outbox
                elif whose:
                    heard(whose, kind, body)
            outbox.end()
            await sending
        except BadMessage as bad:
            outbox.end()
            # A status cannot follow while something is being sent; whoever reads nothing meanwhile hears none.
            await asyncio.wait([sending], timeout=self._beat_s)
            await self.drop(context, whose, bad)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)  # it fails when the stream broke: no news
            if streams.get(whose) is outbox:
                del streams[whose]
                closed(whose)

    async def drop(self, context: Any, whose: str, bad: BadMessage) -> None:
        import grpc

        _log.warning("a stream of %s is ended: %s", whose or context.peer(), bad)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(bad))

    async def admit(self, context: Any) -> None:
        if not protocol.admits(self._token, context.invocation_metadata()):
            import grpc

            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or not this job's")
