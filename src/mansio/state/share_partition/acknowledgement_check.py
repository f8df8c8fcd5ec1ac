"""What a member says of the records it has, made into runs of one type, and whether it may say so.

It comes before anything is changed, because a partition's part of a request is applied whole or not at all.

Always true: nothing is changed in here; runs are ascending and disjoint, and what they are of is leased by the member,
or was withheld because it may be. What the log has lost is left out, as nobody can have it any more; what is below the
start for another reason was settled by somebody, and to say so again is refused.

Source: KIP-932, as Apache Kafka's SharePartition and ShareFetchUtils check it.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import InvalidRecordState, InvalidRequest
from mansio.state.share_partition.batch_map import NOT_PENDING
from mansio.state.share_partition.types import ACQUIRED, RENEW, WITHHELD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.state.share_partition.batch_map import BatchMap, InFlightBatch
    from mansio.state.share_partition.types import AcknowledgementBatch

_TYPES_MAX: Final = RENEW

ONE_BY_ONE_MAX: Final = 20_000
"""Offsets of one partition that a request may name a type for one by one: more than a partition can have on lease."""


class AcknowledgementRun(NamedTuple):
    """Offsets `first` to `last` end alike."""

    first: int
    last: int
    type: int
    said: AcknowledgementBatch


def split_by_type(batches: Sequence[AcknowledgementBatch], start: int) -> list[AcknowledgementRun]:
    """What is below `start` is in the log no more, and left out. Raises `InvalidRequest`."""
    found: list[AcknowledgementRun] = []
    before, one_by_one = -1, 0
    for batch in batches:
        if batch.first <= before or batch.last < batch.first:
            raise InvalidRequest("acknowledged offsets are not in order")
        before = batch.last
        if len(batch.types) != 1 and len(batch.types) != batch.last - batch.first + 1:
            raise InvalidRequest("acknowledgements are neither one nor one for each offset")
        one_by_one += len(batch.types)
        if one_by_one > ONE_BY_ONE_MAX:
            raise InvalidRequest(f"more than {ONE_BY_ONE_MAX} acknowledgements for one partition")
        if max(batch.types) > _TYPES_MAX:
            raise InvalidRequest(f"there is no acknowledgement of type {max(batch.types)}")
        if len(batch.types) == 1:
            if before >= start:
                found.append(AcknowledgementRun(max(batch.first, start), before, batch.types[0], batch))
            continue
        for first, last, type_ in _pieces(batch):
            if last >= start:
                found.append(AcknowledgementRun(max(first, start), last, type_, batch))
    return found


def _pieces(batch: AcknowledgementBatch) -> Iterator[tuple[int, int, int]]:
    first = batch.first
    for type_, equal in groupby(batch.types):
        last = first + sum(1 for _ in equal) - 1
        yield first, last, type_
        first = last + 1


def check(ranges: BatchMap, member: str, run: AcknowledgementRun, *, renew: bool) -> None:
    """Has the member a lease of all of it, in the delivery it speaks of? Raises `InvalidRecordState`.

    What is withheld can be in the hands of one member only, whichever that is.
    """
    if run.type == RENEW and not renew:
        raise InvalidRecordState("this group does not renew leases")
    if run.last >= ranges.end:
        raise InvalidRecordState(f"offset {run.last} is not leased")
    if run.first < ranges.start:
        raise InvalidRecordState(f"offset {run.first} is settled already")
    for batch in ranges.within(run.first, run.last):
        if batch.pending_token != NOT_PENDING or not _is_held(batch, member, run.type):
            raise InvalidRecordState(f"offset {max(batch.first, run.first)} is not leased by this member")
        if run.said.delivery_count not in (-1, batch.deliveries):
            raise InvalidRecordState(f"offset {max(batch.first, run.first)} was delivered again since")


def _is_held(batch: InFlightBatch, member: str, type_: int) -> bool:
    if batch.state == ACQUIRED:
        return batch.holder == member
    return batch.state == WITHHELD and type_ != RENEW
