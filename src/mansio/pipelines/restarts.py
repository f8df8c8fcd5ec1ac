"""Restarts of a job whose query failed for a passing reason, above all: a Python worker of Spark that started slowly.

Spark gives a Python worker ten seconds to start, which no setting changes. On a busy machine that is too short: the
worker imports PySpark, and is then one of many processes. Spark starts such workers to plan a source or a sink and to
run tasks, so the error comes from `load()`, from `start()` or from the running query, in several shapes.

Invariants:
* A job restarts at most `RESTARTS_MAX` times; each restart writes one line with the reason.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, TypeVar

from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

logger = logging.getLogger(__name__)

RESTARTS_MAX: Final = 3
WORKER_START_TIMEOUT_TEXT: Final = "Python worker failed to connect back"
SLOW_WORKER_REASON: Final = (
    "a Python worker of Spark did not start within ten seconds, because the machine is busy"
)


class WorkerStartTimeout(MansioError):
    """A Python worker of Spark did not start within ten seconds, because the machine is busy: try again."""


def run_with_restarts(
    attempt: Callable[[], T],
    job: str,
    *,
    repeated: tuple[type[MansioError], ...] = (),
    on_restart: Callable[[], None] = lambda: None,
) -> T:
    """Return the result of `attempt`, which continues where an earlier call of it failed.

    It is called again after an error of the types `repeated`, and if a Python worker of Spark did not start in time.
    `job`: name of the job for the line that is logged. `on_restart` is called before each restart.

    Raises `WorkerStartTimeout` if a worker was late in the last attempt, too, and the other errors of `attempt`.
    """
    for number in range(1, RESTARTS_MAX + 2):
        try:
            return attempt()
        except Exception as error:
            is_late = is_late_worker(error)
            if number > RESTARTS_MAX and is_late:
                raise WorkerStartTimeout from error
            if number > RESTARTS_MAX or not (is_late or isinstance(error, repeated)):
                raise
            reason = SLOW_WORKER_REASON if is_late else str(error)
            logger.warning(
                "%s continues where it was, restart %d of at most %d: %s", job, number, RESTARTS_MAX, reason
            )
            on_restart()
    raise AssertionError("unreachable")


def is_late_worker(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is that of a Python worker that did not start in time."""
    while error is not None:
        if WORKER_START_TIMEOUT_TEXT in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
