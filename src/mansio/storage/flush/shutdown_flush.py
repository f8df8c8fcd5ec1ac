"""The last housekeeping of many logs, with one sync for all: what makes their next opening quick.

Always true: nothing here is needed for what was acknowledged. A log whose housekeeping fails is opened the slow way.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mansio.storage.flush.batch_sync import SYNC_ALL_FILES_MIN
from mansio.storage.flush.flush_jobs import run_maintenance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Disk
    from mansio.storage.log import Log


def flush_on_shutdown(disk: Disk, root: str, logs: Sequence[Log]) -> None:
    """Checkpoints and indexes of logs that are closed next, as `Log.close` writes them one by one. Blocks.

    All of them are synced, and no sync or housekeeping runs. `root`: see `open_logs`. A log for which it fails has
    failed (`Log.failure`).
    """
    due = [(log, job) for log in logs if (job := log.prepare_maintenance(closing=True)) is not None]
    together = partial(disk.sync_all, root) if len(due) >= SYNC_ALL_FILES_MIN else None
    errors = run_maintenance(disk, [job for _, job in due], together)
    for (log, job), error in zip(due, errors, strict=True):
        log.finish_maintenance(job, error)
