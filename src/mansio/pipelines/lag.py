"""Lag of pipelines: end offsets of the topics minus the offsets that the pipelines have committed.

A pipeline commits its offsets after every micro-batch, so the lag is exact within one trigger interval. The lag is
computed from requests to the brokers, without Spark.

Invariants:
* A pipeline is a group `mansio.pipeline.<name>`. A pipeline without committed offsets, as after `mansio pipeline
  release`, is not shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mansio.errors import GroupIdNotFound
from mansio.net.offsets import fetch_offsets, list_offsets
from mansio.pipelines.group_listing import list_group_ids
from mansio.pipelines.pipeline_progress import newest_progress
from mansio.wire.field_values import LATEST_TIMESTAMP, READ_COMMITTED
from mansio.wire.internal_records.hold_metadata import (
    parse_hold_metadata,
    pipeline_group_id,
    pipeline_name_of,
)

if TYPE_CHECKING:
    from mansio.net.cluster import Cluster
    from mansio.pipelines.pipeline_progress import PipelineProgress
    from mansio.spark.sync_client import SyncClient


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """Lag of a pipeline in one partition. `committed`: next offset that the pipeline will read. `end`: end offset of
    the partition. `has_retention_hold`: whether the broker retains unread records for the pipeline. `progress`: the
    progress of the pipeline as of its last commit; None if an earlier version of Mansio committed it.
    """

    pipeline: str
    topic: str
    partition: int
    committed: int
    end: int
    has_retention_hold: bool
    progress: PipelineProgress | None = None

    @property
    def lag(self) -> int:
        return max(0, self.end - self.committed)


def pipeline_lag(client: SyncClient, name: str | None = None) -> list[PartitionLag]:
    """Return the lag of the pipeline `name`, or of all pipelines, sorted by pipeline, topic and partition. Raises
    `GroupIdNotFound` for an unknown pipeline.
    """
    return client.run(_pipeline_lag(client.cluster, name))


async def _pipeline_lag(cluster: Cluster, name: str | None) -> list[PartitionLag]:
    known = await _pipelines(cluster)
    if name is not None and name not in known:
        there = f"; there are {', '.join(known[:20])}" if known else ""
        raise GroupIdNotFound(f"there is no pipeline {name!r}{there}")
    found = []
    for pipeline in known if name is None else [name]:
        committed = await fetch_offsets(cluster, pipeline_group_id(pipeline))
        ends = await list_offsets(
            cluster, dict.fromkeys(committed, LATEST_TIMESTAMP), isolation_level=READ_COMMITTED
        )
        progress = newest_progress(offset.metadata for offset in committed.values())
        for place, offset in sorted(committed.items()):
            has_retention_hold = parse_hold_metadata(offset.metadata) is not None
            found.append(
                PartitionLag(
                    pipeline, *place, offset.offset, ends[place].offset, has_retention_hold, progress
                )
            )
    return found


async def _pipelines(cluster: Cluster) -> list[str]:
    """Return the names of all pipelines that have committed offsets."""
    ids = await list_group_ids(cluster, lambda group: pipeline_name_of(group.group_id) is not None)
    return sorted(filter(None, map(pipeline_name_of, ids)))
