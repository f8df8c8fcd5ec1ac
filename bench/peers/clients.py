"""Client work in freshly forked processes.

Forking makes asyncio, C and plain socket clients comparable: no process inherits another's threads or connections, and
a process starts in milliseconds because the libraries are already imported. The parent therefore has no threads and
opens no client.

Invariant: measured work starts when every process of a run is ready.
"""

from __future__ import annotations

import multiprocessing
import resource
from threading import BrokenBarrierError
from typing import TYPE_CHECKING, Any

import uvloop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from multiprocessing.connection import Connection

    Ready = Callable[[], None]
    Work = Callable[[Ready], Awaitable[Any]]

FORK = multiprocessing.get_context("fork")
READY_DEADLINE_S = 30.0
JOIN_DEADLINE_S = 5.0
AFTER_FAILURE_S = 1.0


class ClientError(RuntimeError):
    """Work in a client process failed; the message is its error."""


def together(works: Sequence[Work], deadline_s: float) -> list[Any]:
    """Run each function in its own process, all starting at once. Returns their results; raises `ClientError`."""
    barrier = FORK.Barrier(len(works))
    running = []
    try:
        for work in works:
            ours, theirs = FORK.Pipe(duplex=False)
            process = FORK.Process(target=_child, args=(work, barrier, theirs), daemon=True)
            process.start()
            theirs.close()
            running.append((process, ours))
        results: list[Any] = []
        failures: list[str] = []
        for _, answers in running:
            succeeded, result = _outcome(
                answers, AFTER_FAILURE_S if failures else deadline_s + READY_DEADLINE_S
            )
            (results if succeeded else failures).append(result)
        if failures:  # the others may only have noticed that one is missing
            raise ClientError(
                min(failures, key=lambda failure: failure.startswith(BrokenBarrierError.__name__))
            )
        return results
    finally:
        for process, answers in running:
            process.join(JOIN_DEADLINE_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            answers.close()


def alone(work: Callable[[], Awaitable[Any]], deadline_s: float = READY_DEADLINE_S) -> Any:
    """Run one function that is not measured in its own process."""

    async def run(ready: Ready) -> Any:
        ready()
        return await work()

    return together([run], deadline_s)[0]


def clients_cpu_s() -> float:
    """Processor time of this process and of all client processes that have ended."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _child(work: Work, barrier: Any, answers: Connection) -> None:
    try:
        result = uvloop.run(_awaited(work, lambda: barrier.wait(READY_DEADLINE_S)))
    except BaseException as error:  # noqa: BLE001  # reported to the parent
        barrier.abort()
        answers.send((False, f"{type(error).__name__}: {error}"))
    else:
        answers.send((True, result))


async def _awaited(work: Work, ready: Ready) -> Any:
    return await work(ready)


def _outcome(answers: Connection, wait_s: float) -> tuple[bool, Any]:
    """(whether the work succeeded, its result or its error)."""
    if not answers.poll(wait_s):
        return False, f"no result within {wait_s:.0f} s"
    try:
        succeeded, result = answers.recv()
    except EOFError:
        return False, "the client process died"
    return succeeded, result
