"""Header of a record's priority, and how a batch with such headers is read.

On a topic with mansio.priority.enable share groups receive records of high priority first.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import InvalidRecord
from mansio.tracebacks import copied
from mansio.wire.batch.inspection import REPORTED_RECORDS_MAX
from mansio.wire.batch.record_batch import read_varint, varint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.wire.batch.inspection import InspectedBatch
    from mansio.wire.batch.record_batch import BatchHeader

PRIORITY_HEADER: Final = "mansio-priority"


class Priority(IntEnum):
    """Priority of a record. The numbers are stored."""

    NORMAL = 0
    HIGH = 1
    LOW = 2


PRIORITIES: Final = (Priority.HIGH, Priority.NORMAL, Priority.LOW)
"""All priorities, the highest first."""

PRIORITY_NAMES: Final = {"high": Priority.HIGH, "normal": Priority.NORMAL, "low": Priority.LOW}

PRIORITY_NAME: Final = PRIORITY_HEADER.encode()
_NAME_AND_LENGTH: Final = varint(len(PRIORITY_NAME)) + PRIORITY_NAME
_VALUES: Final = {name.encode(): priority for name, priority in PRIORITY_NAMES.items()}


class PriorityRun(NamedTuple):
    """Records of one batch with the same priority, by the first and the last of their offset deltas."""

    first_delta: int
    last_delta: int
    priority: Priority


def read_priorities(inspected: InspectedBatch, name: str, *, strict: bool) -> Sequence[PriorityRun]:
    """Return the records of a batch whose priority is not normal, in the order of their offsets.

    `strict`: the batch is of a producer: raise `InvalidRecord` with the indexes of the records whose headers are
    invalid, and `MessageTooLarge` for too many headers. Otherwise such records have normal priority.
    `name`: that of the partition, for errors."""
    header, data = inspected.header, inspected.data
    if PRIORITY_NAME not in data:
        return ()
    bounds = inspected.bounds
    if (uniform := _read_uniform(data, bounds, header)) is not None:
        return uniform
    if strict:
        inspected.check_header_count(name)
    found: dict[int, Priority] = {}
    errors: dict[int, str] = {}
    for index, value in inspected.find(PRIORITY_NAME):
        if index in found or index in errors:
            errors.setdefault(index, f"a record has the header {PRIORITY_HEADER} once")
        elif value is None or (priority := _VALUES.get(value)) is None:
            errors[index] = f"{PRIORITY_HEADER} is high, normal or low"
        else:
            found[index] = priority
    if errors and strict:
        first, reason = next(iter(errors.items()))
        rejection = InvalidRecord(f"{name}: {reason} (record {first} of the batch)")
        rejection.record_errors = tuple(errors.items())[:REPORTED_RECORDS_MAX]
        raise copied(rejection)
    runs: list[PriorityRun] = []
    for index, priority in found.items():
        if priority is Priority.NORMAL or index in errors:
            continue
        delta = _offset_delta(data, bounds[index])
        last = runs[-1] if runs else None
        if last is not None and last.last_delta + 1 == delta and last.priority is priority:
            runs[-1] = PriorityRun(last.first_delta, delta, priority)
        else:
            runs.append(PriorityRun(delta, delta, priority))
    return runs


def _read_uniform(data: bytes, bounds: Sequence[int], header: BatchHeader) -> Sequence[PriorityRun] | None:
    """Return the priority of a batch in which it is the last header of each record and the same one, as our client
    sends them; None if it is another batch. Takes a tenth of the time."""
    count = header.record_count
    if header.last_offset_delta != count - 1 or data.count(PRIORITY_NAME) != count:
        return None
    for value, priority in _VALUES.items():
        tail = _NAME_AND_LENGTH + varint(len(value)) + value
        if data.endswith(tail):
            is_uniform = all(data.endswith(tail, begin, end) for begin, end in pairwise(bounds))
            if not is_uniform:
                return None
            return () if priority is Priority.NORMAL else (PriorityRun(0, count - 1, priority),)
    return None


def _offset_delta(data: bytes, begin: int) -> int:
    _, position = read_varint(data, begin)  # length
    _, position = read_varint(data, position + 1)  # attributes, timestamp
    return read_varint(data, position)[0]
