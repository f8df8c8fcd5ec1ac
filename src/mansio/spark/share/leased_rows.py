"""Reader of leased ranges in a task: the records of these ranges, with their delivery count and the member of the
lease.

Invariants:
* Rows are in the order of the ranges, and a record is returned once.
* A record between two ranges, which another member may have, is not returned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from mansio.spark.share.leased_ranges import spans
from mansio.spark.source.read_plan import TaskRange
from mansio.spark.source.task_reader import read_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.net.range_leases import RangeLease
    from mansio.spark.options import SourceOptions
    from mansio.spark.share.leased_ranges import LeasedTask

OFFSET: Final = "offset"


def read_leased(options: SourceOptions, names: Sequence[str], task: LeasedTask) -> Iterator[pa.RecordBatch]:
    """Return the records of a task, as Arrow batches with the columns `names`. Raises the errors of `read_range`."""
    from mansio.spark.options import LEASE_COLUMNS

    options = replace(options, isolation_level=task.isolation)
    read = [name for name in names if name not in LEASE_COLUMNS]
    if OFFSET not in read:
        read.append(OFFSET)
    for part in task.parts:
        for ranges in spans(part.ranges):
            hull = TaskRange(part.topic, part.partition, ranges[0].first, ranges[-1].last + 1, part.topic_id)
            for batch in read_range(options, read, hull):
                leased = _leased_rows(batch, ranges, task.member, names)
                if leased.num_rows:
                    yield leased


def _leased_rows(
    batch: pa.RecordBatch, ranges: Sequence[RangeLease], member: str, names: Sequence[str]
) -> pa.RecordBatch:
    """Return the rows of a batch that are in the ranges, with the columns of their lease."""
    offsets = batch.column(OFFSET).to_numpy()
    firsts, lasts, counts = (np.array(column, np.int64) for column in zip(*ranges, strict=True))
    at = np.searchsorted(firsts, offsets, side="right") - 1
    is_leased = (at >= 0) & (offsets <= lasts[at])
    if not is_leased.all():
        batch, at = batch.filter(pa.array(is_leased)), at[is_leased]
    columns = {
        "delivery_count": pa.array(counts[at].astype(np.int32)),
        "lease": pa.repeat(pa.scalar(member), batch.num_rows),
    }
    return pa.RecordBatch.from_arrays(
        [columns[name] if name in columns else batch.column(name) for name in names], list(names)
    )
