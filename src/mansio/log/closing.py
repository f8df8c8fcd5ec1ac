"""The last housekeeping of many logs, with one sync for all: what makes their next opening quick.

Always true: nothing here is needed for what was acknowledged. A log whose housekeeping fails is opened the slow way.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mansio.log.sync_work import run_chores
from mansio.log.together import SYNC_ALL_FILES_MIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.log.log import Log
    from mansio.ports import Disk


def keep_house(disk: Disk, root: str, logs: Sequence[Log]) -> None:
    """Checkpoints and indexes of logs that are closed next, as `Log.close` writes them one by one. Blocks.

    All of them are synced, and no sync or housekeeping runs. `root`: see `open_logs`. A log for which it fails has
    failed (`Log.failure`).
    """
    due = [(log, chores) for log in logs if (chores := log.prepare_chores(closing=True)) is not None]
    together = partial(disk.sync_all, root) if len(due) >= SYNC_ALL_FILES_MIN else None
    errors = run_chores(disk, [chores for _, chores in due], together)
    for (log, chores), error in zip(due, errors, strict=True):
        log.finish_chores(chores, error)
