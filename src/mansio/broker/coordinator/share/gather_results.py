"""Concurrent execution of several coroutines with one result each.

Invariant: only work that ended normally succeeded; cancelled work, and work with an unexpected error, did not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.errors import CoordinatorNotAvailable, MansioError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from mansio.ports import Promise, Scheduler


async def gather_results(
    scheduler: Scheduler, works: Sequence[Coroutine[Any, Any, None]], *, name: str
) -> list[MansioError | None]:
    """Run all works; returns the error of each in order, None for success."""
    if len(works) == 1:
        return [await _outcome(works[0])]
    outcomes: list[MansioError | None] = [CoordinatorNotAvailable(f"{name}: interrupted")] * len(works)
    left = len(works)
    done: Promise[None] = scheduler.promise()

    async def one(number: int, work: Coroutine[Any, Any, None]) -> None:
        nonlocal left
        try:
            outcomes[number] = await _outcome(work)
        finally:
            left -= 1
            if not left and not done.done():
                done.set_result(None)

    for number, work in enumerate(works):
        scheduler.spawn(one(number, work), name=name)
    if works:
        await done
    return outcomes


async def _outcome(work: Coroutine[Any, Any, None]) -> MansioError | None:
    try:
        await work
    except MansioError as error:
        return error
    return None
