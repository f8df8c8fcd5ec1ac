"""Check of the schemas of a partition's records at publish, on its leader.

Each key or value of a client's batch must name a schema (`mansio.wire.batch.schema_frames`) that the schema registry
has under a subject which the settings of the topic allow. That a key or value can be decoded with its schema is not
checked.

The batch is read once, where all features read it, and gives the few different schemas that it names. Whether they are
known is answered by a cache on the event loop. For those that are not in it, the leader of the registry's topic is
asked; meanwhile the batch, and those of the partition behind it, wait in the queue of the `BatchProcessor`
(`LookUpRequired`).

Invariants:
* A batch is accepted or rejected as a whole, and rejected by what the registry has answered: a batch is not accepted
  because the registry cannot be asked.
* Batches are appended in the order of arrival, whether or not they have waited.
* What the broker appends by itself is not checked: markers of transactions, deliveries of delayed records and firings
  of schedules. Delayed records and the record of a schedule are checked when they are accepted.

Model: the broker-side validation of Confluent Server (`confluent.value.schema.validation`),
https://docs.confluent.io/platform/current/schema-registry/schema-validation.html
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.features.feature_ports import SchemaUse
from mansio.broker.partition.append import AppendFeature
from mansio.broker.partition.append_validation import RecordReader
from mansio.broker.partition.partition_hook import LookUpRequired
from mansio.config.topic_config import SUBJECT_BY_RECORD, SUBJECT_BY_TOPIC
from mansio.errors import LeaderNotAvailable, MansioError
from mansio.ports import complete, complete_with_error, result_within
from mansio.tracebacks import without_traceback
from mansio.wire.batch.inspection import InspectedBatch
from mansio.wire.batch.schema_frames import (
    FramedPart,
    SchemaFrames,
    read_schema_frames,
    rejection,
    schema_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from mansio.broker.features.feature_ports import FeaturePorts, SchemaIds
    from mansio.broker.partition.append import Draft
    from mansio.broker.partition.partition import Partition
    from mansio.config.topic_config import TopicSettings
    from mansio.ports import Buffer, Promise

LOOK_UP_MS_MAX: Final = 5_000
"""Time after the arrival of a batch at which the look-up of its schemas ends."""


class FramedBatch(NamedTuple):
    """The frames of the keys and of the values in a client's batch; None if they are all null, or not checked."""

    keys: SchemaFrames | None
    values: SchemaFrames | None


def _read_keys(inspected: InspectedBatch, name: str, now_ms: int) -> FramedBatch | None:
    del now_ms
    found = read_schema_frames(inspected, FramedPart.KEY, name)
    return None if found is None else FramedBatch(found, None)


def _read_values(inspected: InspectedBatch, name: str, now_ms: int) -> FramedBatch | None:
    del now_ms
    found = read_schema_frames(inspected, FramedPart.VALUE, name)
    return None if found is None else FramedBatch(None, found)


def _read_both(inspected: InspectedBatch, name: str, now_ms: int) -> FramedBatch | None:
    del now_ms
    keys = read_schema_frames(inspected, FramedPart.KEY, name)
    values = read_schema_frames(inspected, FramedPart.VALUE, name)
    return None if keys is None and values is None else FramedBatch(keys, values)


KEY_FRAME_READER: Final = RecordReader((), _read_keys)
VALUE_FRAME_READER: Final = RecordReader((), _read_values)
FRAME_READER: Final = RecordReader((), _read_both)


def reader_of(settings: TopicSettings) -> RecordReader | None:
    """Return what finds the frames that are checked on a topic; None if none are."""
    if settings.validates_keys:
        return FRAME_READER if settings.validates_values else KEY_FRAME_READER
    return VALUE_FRAME_READER if settings.validates_values else None


class SchemaValidator(AppendFeature):
    """Check of the schemas of a partition's records. All methods run on the broker's event loop."""

    __slots__ = ("_ids", "_partition")

    def __init__(self, partition: Partition, ports: FeaturePorts) -> None:
        self._partition = partition
        self._ids: SchemaIds = ports.schema_ids

    def prepare(self, draft: Draft) -> None:
        """Check the schemas that a client's batch names.

        Raises `InvalidRecord` with the indexes of the records whose schema is in no subject that may have it, and
        `LookUpRequired`."""
        reader = reader_of(self._partition.settings)
        if reader is not None and (found := draft.inspected.found.get(reader)) is not None:
            self._check(found)

    def check_later(self, batch: Buffer) -> None:
        """Check the schemas that a record names which the broker will append later. Raises the errors of `prepare`, and
        `InvalidRecord` if it names none."""
        reader = reader_of(self._partition.settings)
        if reader is None:
            return
        inspected = InspectedBatch(batch, reader.headers)
        found = reader.read(inspected, self._partition.name, self._partition.clock.wall_ms())
        if found is not None:
            self._check(found)

    def _check(self, batch: FramedBatch) -> None:
        settings = self._partition.settings
        unknown: list[SchemaUse] = []
        if batch.keys is not None:
            unknown += self._unknown(batch.keys, FramedPart.KEY, settings.key_subject_strategy)
        if batch.values is not None:
            unknown += self._unknown(batch.values, FramedPart.VALUE, settings.value_subject_strategy)
        if unknown:
            raise LookUpRequired(partial(self._look_up, unknown))

    def _unknown(self, found: SchemaFrames, part: FramedPart, strategy: str) -> list[SchemaUse]:
        """Return the schemas that have to be looked up. Raises `InvalidRecord` for those that must not be used."""
        topic = self._partition.topic
        subject, prefix = None, ""
        if strategy == SUBJECT_BY_TOPIC:
            subject = f"{topic}-{part}"
        elif strategy != SUBJECT_BY_RECORD:
            prefix = f"{topic}-"
        unknown: list[SchemaUse] = []
        for number, frame in enumerate(found.frames):
            use = SchemaUse(schema_of(frame), subject, prefix)
            known = self._ids.known(use)
            if known is None:
                unknown.append(use)
            elif not known:
                reason = f"the schema {use.schema} of the {part} is {_missing_in(use)}"
                raise rejection(self._partition.name, reason, list(found.indexes(number)))
        return unknown

    async def _look_up(self, uses: Collection[SchemaUse], began_s: float) -> None:
        """Ask the schema registry for schemas. Raises `LeaderNotAvailable`, which producers retry."""
        partition = self._partition
        scheduler = partition.scheduler
        left_ms = LOOK_UP_MS_MAX - (partition.clock.monotonic() - began_s) * 1000
        late = f"no answer in {LOOK_UP_MS_MAX / 1000:g} s"
        promise: Promise[None] = scheduler.promise()

        async def resolve() -> None:
            try:
                await self._ids.resolve(uses)
            except MansioError as error:
                complete_with_error(promise, without_traceback(error))
            else:
                complete(promise, None)

        reason = late
        if left_ms > 0:
            task = scheduler.spawn(resolve(), name="look-up of schemas")
            try:
                await result_within(scheduler, promise, left_ms, late)
            except MansioError as error:
                reason = error.message
            else:
                return
            finally:
                task.cancel()
        raise LeaderNotAvailable(f"{partition.name}: the schema registry cannot be asked now: {reason}")


def _missing_in(use: SchemaUse) -> str:
    if use.subject is not None:
        return f"not in the subject {use.subject}"
    return f"not in the subject {use.record_prefix}NAME, where NAME is the full name of its record"
