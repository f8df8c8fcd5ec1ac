"""Holds of the event loop: which request ran for how long without letting other requests run.

Each protocol measures its requests: those that run at once with `note`, coroutines with `measured`, step by step.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from mansio.ports import Clock

T = TypeVar("T")

HOLD_S_MIN: Final = 0.01
"""Duration below which a hold is not noted."""


class LoopHold(NamedTuple):
    """One hold: its duration, the protocol, the API or route, and the address of the client."""

    hold_ms: float
    protocol: str
    request: str
    peer: str


class LoopHolds:
    """The longest holds of one broker's event loop. All methods run on it."""

    __slots__ = ("_recent", "hold_ms_max", "now")

    def __init__(self, clock: Clock) -> None:
        self.now = clock.monotonic
        self.hold_ms_max = 0.0
        """The longest hold since the start."""
        self._recent: LoopHold | None = None

    def note(self, held_s: float, protocol: str, request: str, peer: str) -> None:
        """Note a hold of `HOLD_S_MIN` or more."""
        held_ms = held_s * 1000
        self.hold_ms_max = max(self.hold_ms_max, held_ms)
        if self._recent is None or held_ms > self._recent.hold_ms:
            self._recent = LoopHold(held_ms, protocol, request, peer)

    def take_recent(self) -> LoopHold | None:
        """Return the longest hold since the last call, None if there was none."""
        found, self._recent = self._recent, None
        return found

    async def measured(
        self, coroutine: Coroutine[Any, Any, T], protocol: str, label: Callable[[], tuple[str, str]]
    ) -> T:
        """Run a coroutine and note its holds. `label` returns the request and the peer; it is called for a hold."""
        return await self._run(coroutine, protocol, label)

    @types.coroutine
    def _run(
        self, coroutine: Coroutine[Any, Any, T], protocol: str, label: Callable[[], tuple[str, str]]
    ) -> Generator[Any, Any, T]:
        sent: Any = None
        awaited: Any = None
        is_thrown = False
        while True:
            if not is_thrown:
                began = self.now()
                try:
                    awaited = coroutine.send(sent)
                except StopIteration as end:
                    result: T = end.value
                    return result
                finally:
                    self._note(began, protocol, label)
            is_thrown = False
            try:
                sent = yield awaited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:  # noqa: BLE001  # passed on; only this clause refers to it
                is_thrown = True
                began = self.now()
                try:
                    awaited = coroutine.throw(error)
                except StopIteration as end:
                    result = end.value
                    return result
                finally:
                    self._note(began, protocol, label)

    def _note(self, began: float, protocol: str, label: Callable[[], tuple[str, str]]) -> None:
        held_s = self.now() - began
        if held_s >= HOLD_S_MIN:
            self.note(held_s, protocol, *label())
