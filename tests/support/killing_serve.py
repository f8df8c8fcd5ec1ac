"""`mansio` that kills itself at a named point of a delivery.

`arm` a point before `main`: a name of `POINTS`, and which time it is reached counts. Always true: when the point is
reached, the process is gone by SIGKILL before another instruction of it runs.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, Final

from mansio.broker.coordinator.share.dead_letter_topics import DeadLetterTopics
from mansio.broker.coordinator.share.state_store import ShareStateStore
from mansio.broker.topics.leader_appends import LeaderAppends
from mansio.cli.main import main
from mansio.state.share_partition.types import ACKNOWLEDGED, ACQUIRED, ARCHIVED, ARCHIVING, AVAILABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.state.share_partition.types import Update

APPENDED: Final[dict[str, Callable[[Update], bool]]] = {
    "lease appended": lambda update: any(each.state == ACQUIRED for each in update.changes),
    "ack appended": lambda update: any(each.state == ACKNOWLEDGED for each in update.changes),
    "release appended": lambda update: any(each.state == AVAILABLE for each in update.changes),
    "rejection appended": lambda update: any(
        each.state == ARCHIVING and each.reservation is not None and each.reservation.producer_id < 0
        for each in update.changes
    ),
    "places appended": lambda update: update.producer is not None and not update.is_snapshot,
    "archived appended": lambda update: any(each.state == ARCHIVED for each in update.changes),
    "redrive appended": lambda update: update.redrives is not None and not update.is_snapshot,
}
"""Of an update that is in the log and not synced."""

ISOLATION_POINT: Final = "isolation appended"
"""Of a fair group; not among `POINTS`, because other groups do not reach it."""

POINTS: Final = (*APPENDED, "snapshot appended", "copy appended", "copy committed", "states loaded")


class _Countdown:
    def __init__(self, left: int) -> None:
        self.left = left

    def reached(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def after(owner: type, name: str, countdown: _Countdown, counts: Callable[..., bool]) -> None:
    """Count each return of a method for whose arguments `counts` is true."""
    true = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        result = true(*arguments, **named)
        if counts(*arguments):
            countdown.reached()
        return result

    setattr(owner, name, call)


def arm(point: str, countdown: _Countdown) -> None:
    """From now on the process dies there."""
    if point in APPENDED:
        after(ShareStateStore, "_write_update", countdown, lambda *arguments: APPENDED[point](arguments[-1]))
    elif point == ISOLATION_POINT:
        after(
            ShareStateStore,
            "_write_update",
            countdown,
            lambda *arguments: arguments[-1].isolations is not None,
        )
    elif point == "snapshot appended":
        after(ShareStateStore, "_snapshot_if_possible", countdown, lambda *_: True)
    elif point == "states loaded":
        after(ShareStateStore, "finish_load", countdown, lambda *_: True)
    elif point == "copy appended":
        appended = LeaderAppends.wait_with_timeout

        async def wait(self: LeaderAppends, *arguments: Any, **_: Any) -> None:
            countdown.reached()
            await appended(self, *arguments)

        LeaderAppends.wait_with_timeout = wait
    elif point == "copy committed":
        append = DeadLetterTopics.append

        async def committed(self: DeadLetterTopics, *arguments: Any, **_: Any) -> None:
            await append(self, *arguments)
            countdown.reached()

        DeadLetterTopics.append = committed
    else:
        raise ValueError(point)


def serve(text: str) -> None:
    """Run `mansio` with the arguments of this process. `text`: a point and a number, or nothing."""
    name, _, number = text.partition(",")
    if name:
        arm(name, _Countdown(int(number)))
    main()
