"""Mansio's own APIs in Kafka's framing: what can be done with leases and Kafka's protocol has no words for.

`AcknowledgeRecords` says of leased records what ShareAcknowledge says, and by when to try again, why they are
rejected, and which delivery is meant; it needs no session. `DescribeLeases` shows who has what of the share
partitions that a broker leads. `RedriveRecords` offers dead records to their group again. All three go to the
leader of the partition, and are announced like every other API: clients skip keys they do not know (KIP-35).

The schemas are written down as kio writes Kafka's, so that `messages` makes readers and writers of both.

Always true: constant; every message is flexible (KIP-482), so fields can be added as tagged ones.
"""

# No postponed annotations: `schemas.fields_of` needs the types themselves.

import uuid
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from mansio.wire.api_versions import ApiKey

REQUEST: Final = "request"

_INT32: Final = {"kafka_type": "int32"}
_INT64: Final = {"kafka_type": "int64"}
_TEXT: Final = {"kafka_type": "string"}
_BYTES: Final = {"kafka_type": "bytes"}
_UUID: Final = {"kafka_type": "uuid"}
_ERROR: Final = {"kafka_type": "error_code"}


class _Flexible:
    __slots__ = ()
    __flexible__: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgeBatch(_Flexible):
    """Offsets `first_offset` to `last_offset`: `types` has one type of acknowledgement for all, or one for each.

    `delay_ms`: of a release, -1 for the group's backoff; `reason`: of a rejection; `delivery_count`: only this
    delivery, -1 for whichever."""

    first_offset: int = field(metadata=_INT64)
    last_offset: int = field(metadata=_INT64)
    types: bytes = field(metadata=_BYTES)
    delay_ms: int = field(metadata=_INT64, default=-1)
    reason: str = field(metadata=_TEXT, default="")
    delivery_count: int = field(metadata=_INT32, default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgePartition(_Flexible):
    partition_index: int = field(metadata=_INT32)
    batches: tuple[AcknowledgeBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgeTopic(_Flexible):
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partitions: tuple[AcknowledgePartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgeRecordsRequest(_Flexible):
    group_id: str = field(metadata=_TEXT)
    member_id: str = field(metadata=_TEXT)
    topics: tuple[AcknowledgeTopic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgedPartition(_Flexible):
    """All of its batches hold, or none of them."""

    partition_index: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgedTopic(_Flexible):
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partitions: tuple[AcknowledgedPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgeRecordsResponse(_Flexible):
    """`acquisition_lock_timeout_ms`: how long a lease that was renewed lasts; 0 where that is not known."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    acquisition_lock_timeout_ms: int = field(metadata=_INT32, default=0)
    topics: tuple[AcknowledgedTopic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeTopic(_Flexible):
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partitions: tuple[int, ...] = field(metadata=_INT32, default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeLeasesRequest(_Flexible):
    """`topics` null: all share partitions of the group that are in use on this broker; `spans_max`: leased ranges shown
    of each, the lowest first."""

    group_id: str = field(metadata=_TEXT)
    topics: tuple[DescribeTopic, ...] | None
    spans_max: int = field(metadata=_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder(_Flexible):
    """What a member has; `oldest_ms`: since its longest lease was given or renewed."""

    member_id: str = field(metadata=_TEXT)
    leased: int = field(metadata=_INT64)
    oldest_ms: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedRange(_Flexible):
    """Offsets one member has, in one delivery of theirs."""

    first_offset: int = field(metadata=_INT64)
    last_offset: int = field(metadata=_INT64)
    member_id: str = field(metadata=_TEXT)
    delivery_count: int = field(metadata=_INT32)
    age_ms: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedPartition(_Flexible):
    """In records but for `start_offset` and `end_offset`, between which is what the group is at. `lag`: not settled
    yet; `trouble`: why dead letters wait, "" where nothing failed."""

    partition_index: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    start_offset: int = field(metadata=_INT64, default=-1)
    end_offset: int = field(metadata=_INT64, default=-1)
    lag: int = field(metadata=_INT64, default=-1)
    leased: int = field(metadata=_INT64, default=0)
    parked: int = field(metadata=_INT64, default=0)
    withheld: int = field(metadata=_INT64, default=0)
    archiving: int = field(metadata=_INT64, default=0)
    dead: int = field(metadata=_INT64, default=0)
    trouble: str = field(metadata=_TEXT, default="")
    holders: tuple[Holder, ...]
    ranges: tuple[LeasedRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedTopic(_Flexible):
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partitions: tuple[DescribedPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeLeasesResponse(_Flexible):
    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    topics: tuple[DescribedTopic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetRange(_Flexible):
    first_offset: int = field(metadata=_INT64)
    last_offset: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveRecordsRequest(_Flexible):
    """`offsets` null: all that are dead; `most`: no more than so many of them. Under one id an offset is offered once,
    also when it died again since."""

    redrive_id: str = field(metadata=_TEXT)
    group_id: str = field(metadata=_TEXT)
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partition_index: int = field(metadata=_INT32)
    offsets: tuple[OffsetRange, ...] | None
    most: int = field(metadata=_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveRecordsResponse(_Flexible):
    """`offered` now, `done_before` under this id, `gone` from the log; `dead`: that could be offered after this."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    offered: int = field(metadata=_INT64, default=0)
    done_before: int = field(metadata=_INT64, default=0)
    gone: int = field(metadata=_INT64, default=0)
    dead: int = field(metadata=_INT64, default=0)


_MESSAGES: Final[dict[int, tuple[Any, Any]]] = {
    ApiKey.ACKNOWLEDGE_RECORDS: (AcknowledgeRecordsRequest, AcknowledgeRecordsResponse),
    ApiKey.DESCRIBE_LEASES: (DescribeLeasesRequest, DescribeLeasesResponse),
    ApiKey.REDRIVE_RECORDS: (RedriveRecordsRequest, RedriveRecordsResponse),
}


def is_mansio_api(api_key: int) -> bool:
    """Is this one of ours, which kio does not know?"""
    return api_key in _MESSAGES


def schema(api_key: int, version: int, direction: str) -> Any:
    """The schema of a message. Raises `ValueError` for a version that there is not."""
    if version != 0:
        raise ValueError(f"there is no {direction} {api_key} in version {version}")
    request, response = _MESSAGES[api_key]
    return request if direction == REQUEST else response
