"""Control batches by which a partition's log stores recurring schedules (docs/internals/file-format.md).

The value of the record is one of:

    SCHEDULED    definitions and states of schedules, each with the record that it appends. Written when a schedule is
                 created, paused or resumed, when missed firings are skipped, and as a copy before the start of the log
                 is deleted. The latest one replaces earlier ones.
    FIRED        firings that the next batch of the log contains: the schedule, the number of the firing, and when the
                 schedule is due next. Valid only if that batch follows directly and has the CRC named here, so after a
                 crash between the two the schedule is due as before.
    UNSCHEDULED  ids of schedules that were deleted.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from mansio.errors import CorruptMessage, MansioError
from mansio.wire.batch.control_records import NO_TIMESTAMP_MS, encode_control_batch, read_control_record
from mansio.wire.batch.record_batch import HEADER_BYTES, build_batch, read_header
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Buffer
    from mansio.wire.batch.record_batch import Header, NewRecord

VALUE_VERSION: Final = 1
OWNERS_VERSION: Final = 2
"""Version of a value of SCHEDULED in which the schedules have owners. Without them version 1 is written, which earlier
versions of Mansio read."""

NOT_DUE_MS: Final = -1
"""Due time of a schedule that is paused or never fires again."""

_VALUE_HEAD: Final = struct.Struct(">BI")  # version, number of schedules or firings
_FIRING: Final = struct.Struct(">16sqq")  # schedule, number, next due time
_STATE: Final = struct.Struct(">16sqqqqBBHHH")  # see `_encode_state`
_STATE_WITH_OWNER: Final = struct.Struct(">16sqqqqBBHHHH")
_CRC: Final = struct.Struct(">I")
_ID_BYTES: Final = 16
_PAUSED: Final = 1


class ScheduleControlType(IntEnum):
    """Types of control records; 20001 to 20005 are those of delayed records."""

    SCHEDULED = 20006
    FIRED = 20007
    UNSCHEDULED = 20008


class CatchUpMode(IntEnum):
    """Which missed firings are caught up, for example after the broker was down: none, the last one, or all."""

    NONE = 0
    LAST = 1
    ALL = 2


class Schedule(NamedTuple):
    """Definition and state of a recurring schedule.

    `cron`: five fields, evaluated in `timezone`, or ""; then `every_ms` is the interval, counted from `created_ms`.
    `next_due_ms`: since the Unix epoch, `NOT_DUE_MS` if it is paused or never fires again; `firings`: number of records
    that it has appended. `key`, `value` and `headers` are those of these records. `owner`: who has created it, as
    `Authorization.owner_of` returns it.
    """

    id: UUID
    name: str
    cron: str
    every_ms: int
    timezone: str
    catch_up: CatchUpMode
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    created_ms: int
    next_due_ms: int
    firings: int = 0
    is_paused: bool = False
    owner: str = ""


class Firing(NamedTuple):
    """One firing: the number of the record among those of its schedule, from 1 on, and when the schedule is due next,
    `NOT_DUE_MS` for never."""

    schedule_id: UUID
    number: int
    next_due_ms: int


class ScheduleControlRecord(NamedTuple):
    """Content of a control batch: `schedules` of SCHEDULED, `firings` and `crc` of FIRED, `ids` of UNSCHEDULED."""

    type: ScheduleControlType
    schedules: Sequence[Schedule] = ()
    firings: Sequence[Firing] = ()
    crc: int = 0
    ids: Sequence[UUID] = ()


def encode_scheduled(schedules: Sequence[Schedule]) -> bytes:
    """Encode the control batch with definitions and states of schedules, at least one."""
    return encode_control_batch(ScheduleControlType.SCHEDULED, encode_schedules(schedules))


def encode_fired(firings: Sequence[Firing], crc: int) -> bytes:
    """Encode the control batch that precedes the batch with this CRC, which contains the records of the firings."""
    parts = [_VALUE_HEAD.pack(VALUE_VERSION, len(firings))]
    parts += [_FIRING.pack(one.schedule_id.bytes, one.number, one.next_due_ms) for one in firings]
    parts.append(_CRC.pack(crc))
    return encode_control_batch(ScheduleControlType.FIRED, b"".join(parts))


def encode_unscheduled(ids: Sequence[UUID]) -> bytes:
    """Encode the control batch that deletes schedules."""
    value = _VALUE_HEAD.pack(VALUE_VERSION, len(ids)) + b"".join(each.bytes for each in ids)
    return encode_control_batch(ScheduleControlType.UNSCHEDULED, value)


def decode_schedule_control(batch: Buffer) -> ScheduleControlRecord | None:
    """Decode a control batch; None if it is of another kind. The CRC is not checked.

    Raises `CorruptMessage` if a batch of these types has another content."""
    found = read_control_record(batch)
    if found is None or found.type not in _TYPES:
        return None
    kind, value = ScheduleControlType(found.type), found.value
    if kind is ScheduleControlType.SCHEDULED:
        return ScheduleControlRecord(kind, decode_schedules(value))
    count = _read_head(value)
    position = _VALUE_HEAD.size
    if kind is ScheduleControlType.UNSCHEDULED:
        if len(value) != position + count * _ID_BYTES:
            raise CorruptMessage(f"{count} ids in a control record of {len(value)} bytes")
        starts = range(position, len(value), _ID_BYTES)
        ids = [UUID(bytes=bytes(value[start : start + _ID_BYTES])) for start in starts]
        return ScheduleControlRecord(kind, ids=ids)
    end = position + count * _FIRING.size
    if len(value) != end + _CRC.size:
        raise CorruptMessage(f"{count} firings in a control record of {len(value)} bytes")
    firings = [
        Firing(UUID(bytes=schedule_id), number, next_due_ms)
        for schedule_id, number, next_due_ms in _FIRING.iter_unpack(value[position:end])
    ]
    return ScheduleControlRecord(kind, firings=firings, crc=_CRC.unpack_from(value, end)[0])


_TYPES: Final = frozenset(ScheduleControlType)


def encode_schedules(schedules: Sequence[Schedule]) -> bytes:
    """Encode definitions and states of schedules, at least one, as the value of a control record."""
    records: list[NewRecord] = [(NO_TIMESTAMP_MS, one.key, one.value, one.headers) for one in schedules]
    version = OWNERS_VERSION if any(one.owner for one in schedules) else VALUE_VERSION
    states = [_encode_state(one, has_owner=version == OWNERS_VERSION) for one in schedules]
    return b"".join((_VALUE_HEAD.pack(version, len(schedules)), *states, build_batch(records)))


def decode_schedules(value: memoryview) -> list[Schedule]:
    """Decode the bytes of `encode_schedules`. Raises `CorruptMessage`."""
    has_owners = value[:1] == bytes([OWNERS_VERSION])
    count = _read_head(value, OWNERS_VERSION if has_owners else VALUE_VERSION)
    layout = _STATE_WITH_OWNER if has_owners else _STATE
    position = _VALUE_HEAD.size
    states: list[tuple[Any, ...]] = []
    texts: list[list[str]] = []
    try:
        for _ in range(count):
            state = layout.unpack_from(value, position)
            position += layout.size
            states.append(state)
            texts.append([])
            for size in state[7:]:
                if position + size > len(value):
                    raise CorruptMessage("a control record of schedules is too short")
                texts[-1].append(bytes(value[position : position + size]).decode())
                position += size
        batch = value[position:]
        if len(batch) < HEADER_BYTES or read_header(batch).size != len(batch):
            raise CorruptMessage("a control record of schedules contains an incomplete batch")
        records = read_records(batch, output_bytes_max=len(batch))
        if len(records) != count:
            raise CorruptMessage(f"{len(records)} records in a control record of {count} schedules")
        return [
            Schedule(
                UUID(bytes=schedule_id),
                name,
                cron,
                every_ms,
                timezone,
                CatchUpMode(catch_up),
                record.key,
                record.value,
                tuple(record.headers),
                created_ms,
                next_due_ms,
                firings,
                bool(flags & _PAUSED),
                *owner,
            )
            for (schedule_id, created_ms, every_ms, next_due_ms, firings, catch_up, flags, *_), (
                name,
                cron,
                timezone,
                *owner,
            ), record in zip(states, texts, records, strict=True)
        ]
    except (struct.error, ValueError) as error:
        raise CorruptMessage("a control record of schedules cannot be decoded") from error
    except CorruptMessage:
        raise
    except MansioError as error:
        raise CorruptMessage("a record of a schedule cannot be decoded") from error


def _read_head(value: memoryview, wanted: int = VALUE_VERSION) -> int:
    if len(value) < _VALUE_HEAD.size:
        raise CorruptMessage("a control record of schedules is too short")
    version, count = _VALUE_HEAD.unpack_from(value)
    if version != wanted:
        raise CorruptMessage(f"version {version} of a control record of schedules is unknown")
    return int(count)


def _encode_state(one: Schedule, *, has_owner: bool) -> bytes:
    texts = [text.encode() for text in (one.name, one.cron, one.timezone)]
    if has_owner:
        texts.append(one.owner.encode())
    layout = _STATE_WITH_OWNER if has_owner else _STATE
    flags = _PAUSED if one.is_paused else 0
    numbers = (one.created_ms, one.every_ms, one.next_due_ms, one.firings, one.catch_up, flags)
    return b"".join((layout.pack(one.id.bytes, *numbers, *map(len, texts)), *texts))
