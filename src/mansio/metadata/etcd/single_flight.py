"""One run of something for all who want its result now.

Always true: while a run is under way, nobody begins another; who goes away does not end it for the others; who comes
after it has ended begins a new one. So a hundred calls that wait for a dead endpoint wait as long as one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """See the module."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: asyncio.Task[T] | None = None

    async def run(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result, or the exception, of the run under way; `begin` makes one if there is none."""
        if self._task is None:
            self._task = asyncio.create_task(begin())
            self._task.add_done_callback(self._done)
        return await asyncio.shield(self._task)

    def _done(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # told to those who waited, if any still do
