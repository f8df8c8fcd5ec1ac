"""Concurrent execution of several coroutines with one result each.

Invariant: the result is None (success) only for a coroutine that returned; a coroutine that was cancelled or raised an
unexpected exception has the result `CoordinatorNotAvailable`. An only coroutine raises such an exception instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.errors import CoordinatorNotAvailable, MansioError
from mansio.host.item_turns import ItemTurns
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from mansio.ports import Promise, Scheduler


async def gather_results(
    scheduler: Scheduler,
    coroutines: Sequence[Coroutine[Any, Any, None]],
    *,
    name: str,
    has_turns: bool = False,
) -> list[MansioError | None]:
    """Run all coroutines in tasks with this name; return the error of each one in order, None for success. They begin
    at once; with `has_turns` other work runs in between if they are many."""
    if len(coroutines) == 1:
        return [await _await_outcome(coroutines[0])]
    outcomes: list[MansioError | None] = [CoordinatorNotAvailable(f"{name}: interrupted")] * len(coroutines)
    unfinished = len(coroutines)
    done: Promise[None] = scheduler.promise()

    async def run_one(number: int, coroutine: Coroutine[Any, Any, None]) -> None:
        nonlocal unfinished
        try:
            outcomes[number] = await _await_outcome(coroutine)
        finally:
            unfinished -= 1
            if not unfinished and not done.done():
                done.set_result(None)

    turns = ItemTurns(scheduler) if has_turns else None
    spawned = 0
    try:
        for number, coroutine in enumerate(coroutines):
            scheduler.spawn(run_one(number, coroutine), name=name)
            spawned += 1
            if turns is not None:
                await turns.next()
    finally:
        for coroutine in coroutines[spawned:]:  # the caller was cancelled
            coroutine.close()
    if coroutines:
        await done
    return outcomes


async def _await_outcome(coroutine: Coroutine[Any, Any, None]) -> MansioError | None:
    try:
        await coroutine
    except MansioError as error:
        return without_traceback(error)
    return None
