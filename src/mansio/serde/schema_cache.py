"""Cache of what a registry has answered.

Invariants:
* It is bounded; the entry that was not used for the longest time is removed.
* A key is asked for once, however many wait for it, and a waiter that is cancelled ends no request of the others.
* "Not found" is kept for a short time, other errors are not kept.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from mansio.serde.errors import SchemaNotFound
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Hashable

ENTRIES_MAX: Final = 1_000
NOT_FOUND_S: Final = 10.0

T = TypeVar("T")


class SchemaCache(Generic[T]):
    """A cache of values by key. `kept_s`: how long a value is kept; None: as long as there is room."""

    def __init__(self, kept_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept_s = kept_s
        self._clock = clock
        self._entries: OrderedDict[Hashable, tuple[float, T | SchemaNotFound]] = OrderedDict()
        self._requests: dict[Hashable, asyncio.Task[T]] = {}

    async def get(self, key: Hashable, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the value of a key; `request` returns it if it is missing. Raises what `request` raises."""
        entry = self._entries.get(key)
        if entry is not None:
            since, found = entry
            kept_s = NOT_FOUND_S if isinstance(found, SchemaNotFound) else self._kept_s
            if kept_s is None or self._clock() - since < kept_s:
                self._entries.move_to_end(key)
                if isinstance(found, SchemaNotFound):
                    raise copied(found)
                return found
        task = self._requests.get(key)
        if task is None:
            task = self._requests[key] = asyncio.ensure_future(self._request(key, request))
            task.add_done_callback(lambda done: self._end(key, done))
        return await asyncio.shield(task)

    def _end(self, key: Hashable, done: asyncio.Task[T]) -> None:
        self._requests.pop(key, None)
        if not done.cancelled():
            done.exception()  # retrieved, also if all that waited are cancelled

    async def close(self) -> None:
        """End the requests that are under way."""
        tasks = list(self._requests.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _request(self, key: Hashable, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            found = await request()
        except SchemaNotFound as error:
            self._keep(key, without_traceback(copied(error)))
            raise
        self._keep(key, found)
        return found

    def _keep(self, key: Hashable, found: T | SchemaNotFound) -> None:
        self._entries[key] = (self._clock(), found)
        self._entries.move_to_end(key)
        while len(self._entries) > ENTRIES_MAX:
            self._entries.popitem(last=False)
