"""Joint plan of the inputs of one query, which advance together in time (`time_order`).

Spark plans a batch by asking the reader of each input for its end, each in a process of its own. So each reader plans
the batch of all inputs and returns its own part. The offsets that it returns contain the ends of the others, too
(`OTHER_INPUTS`): Spark stores them with the batch, so that each reader knows where the others are, also after a
restart.

Invariants:
* A batch has at most `maxOffsetsPerTrigger` offsets of all inputs together.
* If any input has a backlog, the offsets of every reader change, though its own partitions may have to wait: Spark
  would otherwise end a query with Trigger.AvailableNow.
* Readers whose knowledge differs, because records arrived between their requests, differ by as many records only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mansio.net.offsets import fetch_offsets
from mansio.spark.source.offsets import (
    OTHER_INPUTS,
    earliest_offsets,
    find_partitions,
    latest_offsets,
    offsets_for_times,
    offsets_from_json,
    offsets_to_json,
    resolve_offsets,
)
from mansio.spark.source.time_order import TIME_MS_MIN, end_in_time_order
from mansio.spark.sync_client import sync_client
from mansio.wire.internal_records.hold_metadata import pipeline_group_id

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from mansio.spark.options import AlignedInputs, SourceOptions
    from mansio.spark.source.offsets import Offsets
    from mansio.spark.sync_client import SyncClient
    from mansio.wire.topic_partition import TopicPartition

NO_OFFSET_BOUND = 1 << 63
"""In place of the offset of a record that does not exist."""


class Place(NamedTuple):
    """A partition of an input. Two inputs may read the same partition."""

    input: int
    partition: TopicPartition


@dataclass(frozen=True, slots=True)
class JointBacklog:
    """What all inputs have not read yet: the offsets [begin, latest) of each partition."""

    begin: dict[Place, int]
    latest: dict[Place, int]

    @property
    def size(self) -> int:
        """The number of offsets."""
        return sum(max(0, end - self.begin[place]) for place, end in self.latest.items())


class JointPlanner:
    """Plans the batches of all inputs, in the reader of one of them."""

    def __init__(self, options: SourceOptions, aligned: AlignedInputs) -> None:
        """`options`: those of the reader's own input."""
        self._options = options
        self._own = aligned.own
        self._inputs = aligned.inputs
        self._others = [number for number in range(len(aligned.inputs)) if number != aligned.own]
        self._target: dict[Place, int] | None = None
        self._time_ms = TIME_MS_MIN
        """Time of the end of the previous batch."""

    def set_target(self) -> None:
        """Store the current end offsets of the other inputs as their end: they do not read later records."""
        self._target = self._latest(self._find_others())

    def backlog(
        self, begin: Offsets, latest: Offsets, start: Mapping[str, Any], *, is_first: bool
    ) -> JointBacklog:
        """Return the backlog of all inputs, of which the own one has the offsets [begin, latest). `start`: the offsets
        of the previous batch as Spark stores them. `is_first`: there is no previous batch.
        """
        joint = JointBacklog(
            {Place(self._own, partition): offset for partition, offset in begin.items()},
            {Place(self._own, partition): offset for partition, offset in latest.items()},
        )
        if not self._others:
            return joint
        existing = self._find_others()
        known = self._positions(start, existing, is_first=is_first)
        added = {place for place in existing if place not in known}
        starts = earliest_offsets(self._client, {place.partition for place in added})
        known |= {place: starts[place.partition] for place in added}
        for place, end in self._latest(existing).items():
            joint.begin[place] = known[place]
            reachable = end if self._target is None else min(end, self._target.get(place, 0))
            joint.latest[place] = max(reachable, known[place])
        return joint

    def plan(self, joint: JointBacklog, offsets_max: int) -> tuple[Offsets, dict[str, Any]]:
        """Return the end of the next batch: that of the own partitions, and what their stored offsets also contain."""
        now_ms = int(time.time() * 1000)
        end, self._time_ms = end_in_time_order(
            joint.begin, joint.latest, offsets_max, self._offsets_at, after_ms=self._time_ms, guess_ms=now_ms
        )
        own = {place.partition: offset for place, offset in end.items() if place.input == self._own}
        others: dict[str, Any] = {
            str(number): offsets_to_json(
                {place.partition: offset for place, offset in end.items() if place.input == number}
            )
            for number in self._others
        }
        return own, {OTHER_INPUTS: others} if others else {}

    # -- internals --------

    @property
    def _client(self) -> SyncClient:
        return sync_client(self._options.bootstrap_servers, self._options.security)

    def _find_others(self) -> set[Place]:
        """Return the partitions of the other inputs. A missing topic is reported by its own reader."""
        return {
            Place(number, partition)
            for number in self._others
            for partition in find_partitions(
                self._client, self._inputs[number], may_be_missing=True
            ).partitions
        }

    def _positions(
        self, start: Mapping[str, Any], existing: Collection[Place], *, is_first: bool
    ) -> dict[Place, int]:
        """Where the other inputs are: as stored, or where they begin. Without either, as in the checkpoint of a run
        without a limit, the offsets that the pipeline has committed after its last batch.
        """
        stored = start.get(OTHER_INPUTS)
        if isinstance(stored, dict) and stored.keys() == {str(number) for number in self._others}:
            return {
                Place(number, partition): offset
                for number in self._others
                for partition, offset in offsets_from_json(stored[str(number)]).items()
            }
        if is_first:
            return self._initial(existing)
        partitions = {place.partition for place in existing}
        group = pipeline_group_id(self._options.pipeline)
        committed = self._client.run(fetch_offsets(self._client.cluster, group, partitions))
        return {
            place: committed[place.partition].offset for place in existing if place.partition in committed
        }

    def _initial(self, existing: Collection[Place]) -> dict[Place, int]:
        """Where the other inputs begin without a checkpoint."""
        found: dict[Place, int] = {}
        for number in self._others:
            partitions = [place.partition for place in existing if place.input == number]
            options = self._inputs[number]
            earliest = earliest_offsets(self._client, partitions)
            latest = latest_offsets(self._client, partitions, options.isolation_level)
            start = resolve_offsets(self._client, options, "starting", earliest, latest)
            found |= {Place(number, partition): offset for partition, offset in start.items()}
        return found

    def _latest(self, places: Iterable[Place]) -> dict[Place, int]:
        return self._by_isolation(places, latest_offsets)

    def _offsets_at(self, time_ms: int, places: Collection[Place]) -> dict[Place, int]:
        """Return the offset of the first record of each partition with at least this timestamp."""

        def find(client: SyncClient, partitions: Iterable[TopicPartition], isolation: int) -> Offsets:
            return offsets_for_times(client, dict.fromkeys(partitions, time_ms), isolation)

        found = self._by_isolation(places, find)
        return {place: offset if offset >= 0 else NO_OFFSET_BOUND for place, offset in found.items()}

    def _by_isolation(
        self,
        places: Iterable[Place],
        find: Callable[[SyncClient, Iterable[TopicPartition], int], Offsets],
    ) -> dict[Place, int]:
        """Return the results of one request for all inputs with the same isolation level."""
        groups: dict[int, list[Place]] = {}
        for place in places:
            groups.setdefault(self._inputs[place.input].isolation_level, []).append(place)
        found: dict[Place, int] = {}
        for isolation, group in groups.items():
            offsets = find(self._client, {place.partition for place in group}, isolation)
            found |= {place: offsets[place.partition] for place in group}
        return found
