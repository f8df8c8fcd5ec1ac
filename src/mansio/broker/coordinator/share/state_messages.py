"""Codec of the requests and responses between brokers about the state of share partitions (API keys 83 to 87).

The messages are Kafka's with additional tagged fields: the sending broker and its epoch, the read session of a write,
whether the write must be committed, and the parts of a state that Kafka does not have. One request carries entries for
several share partitions. If they belong to several groups, a tagged field of an entry contains its group.

Invariants: results are in the order of the entries of the request. Decoding invalid bytes raises `WireError` and no
other exception.

Source: KIP-932; WriteShareGroupStateRequest.json and related schemas of Apache Kafka 4.3.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from mansio.broker.coordinator.share.state_store import WriteToken
from mansio.errors import WireError
from mansio.state.share_partition.state_records import (
    UNCHANGED,
    decode_update,
    encode_changes,
    encode_update_tags,
    read_changes,
)
from mansio.state.share_partition.types import NUMBER_MAX, LoadedState, ShareKey, ShareSummary, Update
from mansio.wire.api_versions import ApiKey
from mansio.wire.headers import framed_response, read_response_header, request_header
from mansio.wire.internal_records.flexible_codec import (
    NO_TAGGED_FIELDS,
    Reader,
    encode_array,
    encode_string,
    encode_tagged_fields,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

VERSIONS: Final = {
    ApiKey.INITIALIZE_SHARE_GROUP_STATE: 0,
    ApiKey.READ_SHARE_GROUP_STATE: 0,
    ApiKey.WRITE_SHARE_GROUP_STATE: 1,
    ApiKey.DELETE_SHARE_GROUP_STATE: 0,
    ApiKey.READ_SHARE_GROUP_STATE_SUMMARY: 1,
}

# Numbers of the tagged fields that Kafka does not have.
_DURABLE_TAG: Final = 1020
_WITHHELD_MS_TAG: Final = 1021
_SENDER_TAG: Final = 1022
_WRITE_TOKEN_TAG: Final = 1023
_COMPLETE_TAG: Final = 1024
_SNAPSHOT_TAG: Final = 1025
_ABSENT_TAG: Final = 1026
_GROUP_TAG: Final = 1027
_DELIVERY_COMPLETE_COUNT_TAG: Final = 1028
_EPOCHS_TAG: Final = 1029
_ARCHIVING_TAG: Final = 1030
_NUMBER_TAG: Final = 1031
_BACKLOG_QUEUES_TAG: Final = 1032

# Number of the same field in a record of the topic.
_DELIVERY_COMPLETE_COUNT_RECORD_TAG: Final = 0

_INITIALIZE_ENTRY: Final = Struct(">iiq")  # partition, state epoch, start offset
_READ_ENTRY: Final = Struct(">ii")  # partition, leader epoch
_DELETE_ENTRY: Final = Struct(">i")
_WRITE_ENTRY: Final = Struct(
    ">iiiqi"
)  # partition, state epoch, leader epoch, start offset, delivery complete count
_RESULT_HEADER: Final = Struct(">ih")  # partition, error code
_READ_RESULT: Final = Struct(">iq")  # state epoch, start offset
_SUMMARY_RESULT: Final = Struct(">iiqi")  # state epoch, leader epoch, start offset, delivery complete count
_SENDER_FIELDS: Final = Struct(">iq")
_WRITE_TOKEN_FIELDS: Final = Struct(">qi")
_INT64: Final = Struct(">q")
_TWO_INT32: Final = Struct(">ii")
_TRUE: Final = b"\x01"


class RequestSender(NamedTuple):
    """The sending broker and its epoch."""

    node_id: int
    broker_epoch: int


class StateRequestEntry(NamedTuple):
    """One share partition in a request about share state.

    Each API uses some of the fields; the others keep their defaults.
    """

    key: ShareKey
    state_epoch: int = 0
    leader_epoch: int = 0
    start_offset: int = 0
    write_token: WriteToken | None = None
    update: Update | None = None


class StateResult(NamedTuple):
    """Result of one entry.

    `session`: the read session that a read began. `state`, `summary`: result of a read; None if there is no state.
    """

    error_code: int = 0
    message: str | None = None
    session: int = 0
    state: LoadedState | None = None
    summary: ShareSummary | None = None


# ---------------------------------------------------------------------- requests


def encode_request(
    api_key: int, sender: RequestSender, state_requests: Sequence[StateRequestEntry], client_id: str
) -> bytes:
    """Return the encoded request with its length and correlation id 0."""
    group = state_requests[0].key.group
    topics = (
        state_request.key.topic_id
        + encode_array((_encode_entry(api_key, group, state_request),))
        + NO_TAGGED_FIELDS
        for state_request in state_requests
    )
    body = b"".join(
        (
            request_header(api_key, VERSIONS[ApiKey(api_key)], 0, client_id),
            encode_string(group),
            encode_array(topics),
            encode_tagged_fields({_SENDER_TAG: _SENDER_FIELDS.pack(*sender)}),
        )
    )
    return len(body).to_bytes(4, "big") + body


def decode_request(api_key: int, body: bytes) -> tuple[RequestSender | None, list[StateRequestEntry]]:
    """Return sender and entries of a request; the sender is None if the request does not contain it."""
    reader = Reader(body, "share state request", error=WireError)
    group = reader.read_string()
    found = reader.read_array(
        lambda: _read_topic(reader, lambda topic: _decode_entry(api_key, group, topic, reader))
    )
    sender = reader.read_tagged_fields().get(_SENDER_TAG)
    reader.check_end()
    known = None if sender is None else RequestSender(*reader.unpack_field(_SENDER_FIELDS, sender))
    return known, [state_request for state_requests in found for state_request in state_requests]


def _encode_entry(api_key: int, group: str, state_request: StateRequestEntry) -> bytes:
    key, fields = state_request.key, {}
    if key.group != group:
        fields[_GROUP_TAG] = encode_string(key.group)
    if key.number:
        fields[_NUMBER_TAG] = bytes((key.number,))
    if api_key == ApiKey.INITIALIZE_SHARE_GROUP_STATE:
        start = _INITIALIZE_ENTRY.pack(key.partition, state_request.state_epoch, state_request.start_offset)
    elif api_key == ApiKey.WRITE_SHARE_GROUP_STATE:
        start, more = _encode_write(state_request)
        fields |= more
    elif api_key == ApiKey.DELETE_SHARE_GROUP_STATE:
        start = _DELETE_ENTRY.pack(key.partition)
    else:
        start = _READ_ENTRY.pack(key.partition, state_request.leader_epoch)
    return start + encode_tagged_fields(fields)


def _encode_write(state_request: StateRequestEntry) -> tuple[bytes, dict[int, bytes]]:
    update, write_token = state_request.update, state_request.write_token
    assert update is not None, "a write has an update"
    assert write_token is not None, "a write has a write token"
    fields = encode_update_tags(update)
    fields.pop(_DELIVERY_COMPLETE_COUNT_RECORD_TAG, None)
    fields[_WRITE_TOKEN_TAG] = _WRITE_TOKEN_FIELDS.pack(*write_token)
    if update.durable:
        fields[_DURABLE_TAG] = _TRUE
    if update.is_snapshot:
        fields[_SNAPSHOT_TAG] = _TRUE
    start = _WRITE_ENTRY.pack(
        state_request.key.partition,
        state_request.state_epoch,
        state_request.leader_epoch,
        update.start_offset,
        update.done_count,
    )
    return start + encode_changes(update.changes), fields


def _decode_entry(api_key: int, group: str, topic_id: bytes, reader: Reader) -> StateRequestEntry:
    state_epoch = leader_epoch = start_offset = 0
    write_token = update = None
    if api_key == ApiKey.INITIALIZE_SHARE_GROUP_STATE:
        index, state_epoch, start_offset = reader.unpack(_INITIALIZE_ENTRY)
        fields = reader.read_tagged_fields()
    elif api_key == ApiKey.WRITE_SHARE_GROUP_STATE:
        index, state_epoch, leader_epoch, start_offset, done = reader.unpack(_WRITE_ENTRY)
        changes = read_changes(reader)
        fields = reader.read_tagged_fields()
        update = decode_update(
            reader,
            start_offset,
            changes,
            fields,
            snapshot=_SNAPSHOT_TAG in fields,
            durable=_DURABLE_TAG in fields,
        )._replace(done_count=done)
        if _WRITE_TOKEN_TAG not in fields:
            reader.raise_corrupt_log("write without a read session")
        write_token = WriteToken(*reader.unpack_field(_WRITE_TOKEN_FIELDS, fields[_WRITE_TOKEN_TAG]))
    elif api_key == ApiKey.DELETE_SHARE_GROUP_STATE:
        (index,) = reader.unpack(_DELETE_ENTRY)
        fields = reader.read_tagged_fields()
    else:
        index, leader_epoch = reader.unpack(_READ_ENTRY)
        fields = reader.read_tagged_fields()
    if _GROUP_TAG in fields:
        inside = reader.nested_reader(fields[_GROUP_TAG])
        group = inside.read_string()
        inside.check_end()
    number = fields.get(_NUMBER_TAG, b"\0")
    if len(number) != 1 or number[0] > NUMBER_MAX:
        reader.raise_corrupt_log("unknown share partition")
    return StateRequestEntry(
        ShareKey(group, topic_id, index, number[0]),
        state_epoch,
        leader_epoch,
        start_offset,
        write_token,
        update,
    )


# ---------------------------------------------------------------------- responses


def encode_response(
    api_key: int,
    correlation_id: int,
    state_requests: Sequence[StateRequestEntry],
    results: Sequence[StateResult],
) -> bytes:
    """Return the encoded response with its length."""
    topics = (
        state_request.key.topic_id
        + encode_array((_encode_result(api_key, state_request, result),))
        + NO_TAGGED_FIELDS
        for state_request, result in zip(state_requests, results, strict=True)
    )
    return framed_response(
        api_key, VERSIONS[ApiKey(api_key)], correlation_id, encode_array(topics) + NO_TAGGED_FIELDS
    )


def decode_response(api_key: int, frame: bytes) -> list[StateResult]:
    """Return the results in a response; `frame` is the response without its length."""
    _, position = read_response_header(api_key, VERSIONS[ApiKey(api_key)], frame)
    reader = Reader(bytes(frame[position:]), "share state response", error=WireError)
    found = reader.read_array(lambda: _read_topic(reader, lambda _: _decode_result(api_key, reader)))
    reader.read_tagged_fields()
    reader.check_end()
    return [result for results in found for result in results]


def _encode_result(api_key: int, state_request: StateRequestEntry, result: StateResult) -> bytes:
    start = _RESULT_HEADER.pack(state_request.key.partition, result.error_code) + encode_string(
        result.message
    )
    if api_key == ApiKey.READ_SHARE_GROUP_STATE:
        return start + _encode_read_result(result)
    if api_key == ApiKey.READ_SHARE_GROUP_STATE_SUMMARY:
        summary = result.summary
        if summary is None:
            return (
                start
                + _SUMMARY_RESULT.pack(0, UNCHANGED, UNCHANGED, UNCHANGED)
                + encode_tagged_fields({_ABSENT_TAG: _TRUE})
            )
        return start + _SUMMARY_RESULT.pack(*summary[:4]) + encode_tagged_fields(_summary_fields(summary))
    return start + NO_TAGGED_FIELDS


def _summary_fields(summary: ShareSummary) -> dict[int, bytes]:
    fields = {_ARCHIVING_TAG: _TRUE} if summary.is_archiving else {}
    if summary.queues:
        fields[_BACKLOG_QUEUES_TAG] = bytes(summary.queues)
    return fields


def _encode_read_result(result: StateResult) -> bytes:
    state = result.state
    if state is None:
        fields = {_WRITE_TOKEN_TAG: _INT64.pack(result.session), _ABSENT_TAG: _TRUE}
        return _READ_RESULT.pack(0, UNCHANGED) + encode_array(()) + encode_tagged_fields(fields)
    whole = Update(
        0,
        durable=False,
        start_offset=state.start_offset,
        lease_bound=state.lease_bound,
        done_count=state.done_count,
        dead_ranges=state.dead_ranges,
        redrives=state.redrives,
        producer=state.producer,
        isolations=state.isolations or None,
    )
    fields = encode_update_tags(whole)
    fields[_DELIVERY_COMPLETE_COUNT_TAG] = fields.pop(_DELIVERY_COMPLETE_COUNT_RECORD_TAG)
    fields[_WRITE_TOKEN_TAG] = _INT64.pack(result.session)
    fields[_EPOCHS_TAG] = _TWO_INT32.pack(state.leader_epoch, state.snapshot_epoch)
    fields[_WITHHELD_MS_TAG] = _INT64.pack(state.withheld_ms)
    if state.is_complete:
        fields[_COMPLETE_TAG] = _TRUE
    return (
        _READ_RESULT.pack(state.state_epoch, state.start_offset)
        + encode_changes(state.changes)
        + encode_tagged_fields(fields)
    )


def _decode_result(api_key: int, reader: Reader) -> StateResult:
    _, error_code = reader.unpack(_RESULT_HEADER)
    message = reader.read_nullable_string()
    if api_key == ApiKey.READ_SHARE_GROUP_STATE:
        return _decode_read_result(reader, StateResult(error_code, message))
    if api_key == ApiKey.READ_SHARE_GROUP_STATE_SUMMARY:
        found = ShareSummary(*reader.unpack(_SUMMARY_RESULT))
        tags_found = reader.read_tagged_fields()
        summary = (
            None
            if _ABSENT_TAG in tags_found
            else found._replace(
                is_archiving=_ARCHIVING_TAG in tags_found,
                queues=tuple(tags_found.get(_BACKLOG_QUEUES_TAG, b"")),
            )
        )
        return StateResult(error_code, message, summary=summary)
    reader.read_tagged_fields()
    return StateResult(error_code, message)


def _decode_read_result(reader: Reader, result: StateResult) -> StateResult:
    state_epoch, start_offset = reader.unpack(_READ_RESULT)
    changes, fields = read_changes(reader), reader.read_tagged_fields()
    if result.error_code:
        return result
    if not {_WRITE_TOKEN_TAG} <= fields.keys():
        reader.raise_corrupt_log("state without a read session")
    (session,) = reader.unpack_field(_INT64, fields[_WRITE_TOKEN_TAG])
    if _ABSENT_TAG in fields:
        return result._replace(session=session)
    if not {_EPOCHS_TAG, _WITHHELD_MS_TAG, _DELIVERY_COMPLETE_COUNT_TAG} <= fields.keys():
        reader.raise_corrupt_log("incomplete state")
    leader_epoch, snapshot_epoch = reader.unpack_field(_TWO_INT32, fields[_EPOCHS_TAG])
    (withheld_ms,) = reader.unpack_field(_INT64, fields[_WITHHELD_MS_TAG])
    fields[_DELIVERY_COMPLETE_COUNT_RECORD_TAG] = fields[_DELIVERY_COMPLETE_COUNT_TAG]
    whole = decode_update(reader, start_offset, changes, fields, snapshot=True)
    state = LoadedState(
        state_epoch,
        leader_epoch,
        snapshot_epoch,
        start_offset,
        whole.lease_bound,
        whole.done_count,
        changes,
        whole.dead_ranges or (),
        whole.redrives or (),
        whole.producer,
        _COMPLETE_TAG in fields,
        withheld_ms,
        whole.isolations or (),
    )
    return result._replace(session=session, state=state)


# ---------------------------------------------------------------------- requests and responses


def _read_topic(reader: Reader, item: Callable[[bytes], T]) -> tuple[T, ...]:
    topic_id = reader.take(16)
    items = reader.read_array(lambda: item(topic_id))
    reader.read_tagged_fields()
    return items
