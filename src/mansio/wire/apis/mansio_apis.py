"""Schemas of Mansio's own APIs in Kafka's framing: operations on leases that Kafka's protocol lacks, and the
authentication of brokers.

`AcknowledgeRecords` acknowledges leased records like ShareAcknowledge, and in addition with the delay of a release, the
reason of a rejection and the delivery count; it needs no session. `DescribeLeases` returns leases and counts of share
partitions that a broker leads. `RedriveRecords` offers dead records to their group again. All three go to the leader of
the partition and are announced in ApiVersions: clients skip unknown keys (KIP-35).

`ChallengeBroker` and `AuthenticateBroker` are the two steps in which a broker and the broker to which it connected
prove to each other that they know the cluster's secret (`state.broker_handshake`). They are not announced.

The schemas have the form of kio's, so that `messages` compiles codecs for both. Every message is flexible (KIP-482), so
that fields can be added as tagged ones.
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

    `delay_ms`: of a release, -1 for the group's backoff; `reason`: of a rejection; `delivery_count`: of the
    delivery that is meant, -1 for any."""

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
    """Result of one partition: all of its batches are applied, or none."""

    partition_index: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgedTopic(_Flexible):
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partitions: tuple[AcknowledgedPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgeRecordsResponse(_Flexible):
    """`acquisition_lock_timeout_ms`: duration of a renewed lease; 0 if unknown."""

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
    """`topics` null: all share partitions of the group that are in use on this broker; `ranges_max`: leased ranges
    of each, the lowest first."""

    group_id: str = field(metadata=_TEXT)
    topics: tuple[DescribeTopic, ...] | None
    ranges_max: int = field(metadata=_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder(_Flexible):
    """Leases of one member; `oldest_ms`: time since its oldest lease was granted or renewed."""

    member_id: str = field(metadata=_TEXT)
    leased: int = field(metadata=_INT64)
    oldest_ms: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedRange(_Flexible):
    """Offsets leased to one member, with one delivery count."""

    first_offset: int = field(metadata=_INT64)
    last_offset: int = field(metadata=_INT64)
    member_id: str = field(metadata=_TEXT)
    delivery_count: int = field(metadata=_INT32)
    age_ms: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedPartition(_Flexible):
    """Numbers of records, apart from `start_offset` and `end_offset`, which bound the records in flight. `lag`: not
    done yet; `dead_letter_error`: the last error of dead letters, "" for none."""

    partition_index: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    start_offset: int = field(metadata=_INT64, default=-1)
    end_offset: int = field(metadata=_INT64, default=-1)
    lag: int = field(metadata=_INT64, default=-1)
    leased: int = field(metadata=_INT64, default=0)
    in_backoff: int = field(metadata=_INT64, default=0)
    withheld: int = field(metadata=_INT64, default=0)
    archiving: int = field(metadata=_INT64, default=0)
    dead: int = field(metadata=_INT64, default=0)
    dead_letter_error: str = field(metadata=_TEXT, default="")
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
    """`offsets` null: all dead ones; `most`: maximum number of records. Under one id an offset is offered once, even
    if it died again since."""

    redrive_id: str = field(metadata=_TEXT)
    group_id: str = field(metadata=_TEXT)
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partition_index: int = field(metadata=_INT32)
    offsets: tuple[OffsetRange, ...] | None
    most: int = field(metadata=_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveRecordsResponse(_Flexible):
    """`redriven` now, `repeated` under this id, `deleted`: deleted from the log; `dead`: records that remain dead."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    redriven: int = field(metadata=_INT64, default=0)
    repeated: int = field(metadata=_INT64, default=0)
    deleted: int = field(metadata=_INT64, default=0)
    dead: int = field(metadata=_INT64, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChallengeBrokerRequest(_Flexible):
    """`nonce`: of the broker that connects."""

    nonce: bytes = field(metadata=_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChallengeBrokerResponse(_Flexible):
    """`nonce`: of the broker that accepted the connection; valid for one proof on this connection."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    nonce: bytes = field(metadata=_BYTES, default=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticateBrokerRequest(_Flexible):
    """The broker that connects, with the epoch of its registration."""

    node_id: int = field(metadata=_INT32)
    broker_epoch: int = field(metadata=_INT64)
    proof: bytes = field(metadata=_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticateBrokerResponse(_Flexible):
    """`proof`: of the broker that accepted the connection; empty with an error, after which it closes the
    connection."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    proof: bytes = field(metadata=_BYTES, default=b"")


_MESSAGES: Final[dict[int, tuple[Any, Any]]] = {
    ApiKey.ACKNOWLEDGE_RECORDS: (AcknowledgeRecordsRequest, AcknowledgeRecordsResponse),
    ApiKey.DESCRIBE_LEASES: (DescribeLeasesRequest, DescribeLeasesResponse),
    ApiKey.REDRIVE_RECORDS: (RedriveRecordsRequest, RedriveRecordsResponse),
    ApiKey.CHALLENGE_BROKER: (ChallengeBrokerRequest, ChallengeBrokerResponse),
    ApiKey.AUTHENTICATE_BROKER: (AuthenticateBrokerRequest, AuthenticateBrokerResponse),
}


def is_mansio_api(api_key: int) -> bool:
    """Whether this is an API of Mansio, which kio does not have."""
    return api_key in _MESSAGES


def schema(api_key: int, version: int, direction: str) -> Any:
    """The schema of a message. Raises `ValueError` for an unknown version."""
    if version != 0:
        raise ValueError(f"there is no {direction} {api_key} in version {version}")
    request, response = _MESSAGES[api_key]
    return request if direction == REQUEST else response
