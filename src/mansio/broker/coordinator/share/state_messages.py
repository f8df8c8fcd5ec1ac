"""Messages between brokers about the state of share partitions: codec of APIs 83 to 87.

Kafka's requests with additional tagged fields: the sender (as in a follower's fetch), the read session of a write,
whether its commit is awaited, and the parts of a state that Kafka does not have. One request carries several share
partitions; in a request for several groups, a tagged field has the group of each partition that is not in the
first one's group.

Invariants: results are in the order of the request. Bytes that are not such a message raise `WireError` and
nothing else.

Source: KIP-932; WriteShareGroupStateRequest.json and related schemas of Apache Kafka 4.3.
"""

from __future__ import annotations

from contextlib import contextmanager
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from mansio.broker.coordinator.share.state_store import WriteToken
from mansio.errors import CorruptLog, WireError
from mansio.state.share_partition.state_records import (
    UNCHANGED,
    decode_update,
    encode_changes,
    encode_update_tags,
    read_changes,
)
from mansio.state.share_partition.types import LoadedState, ShareKey, ShareSummary, Update
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
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

VERSIONS: Final = {
    ApiKey.INITIALIZE_SHARE_GROUP_STATE: 0,
    ApiKey.READ_SHARE_GROUP_STATE: 0,
    ApiKey.WRITE_SHARE_GROUP_STATE: 1,
    ApiKey.DELETE_SHARE_GROUP_STATE: 0,
    ApiKey.READ_SHARE_GROUP_STATE_SUMMARY: 1,
}

_DURABLE: Final = 1020
_WITHHELD: Final = 1021
_SENDER: Final = 1022
_WRITE_TOKEN: Final = 1023
_CERTAIN: Final = 1024
_SNAPSHOT: Final = 1025
_ABSENT: Final = 1026
_GROUP: Final = 1027
_DONE: Final = 1028
_EPOCHS: Final = 1029
_ARCHIVING: Final = 1030
_DONE_IN_RECORDS: Final = 0

_INIT: Final = Struct(">iiq")  # partition, state epoch, start offset
_ASK: Final = Struct(">ii")  # partition, leader epoch
_INDEX: Final = Struct(">i")
_WRITE: Final = Struct(
    ">iiiqi"
)  # partition, state epoch, leader epoch, start offset, delivery complete count
_RESULT: Final = Struct(">ih")  # partition, error code
_STATE: Final = Struct(">iq")  # state epoch, start offset
_SUMMARY: Final = Struct(">iiqi")  # state epoch, leader epoch, start offset, delivery complete count
_SENDER_FIELDS: Final = Struct(">iq")
_WRITE_TOKEN_FIELDS: Final = Struct(">qi")
_LONG: Final = Struct(">q")
_TWO: Final = Struct(">ii")
_YES: Final = b"\x01"


class RequestSender(NamedTuple):
    """The sending broker and its epoch."""

    node_id: int
    broker_epoch: int


class StateRequest(NamedTuple):
    """Entry of a request for one share partition; the API decides which fields are used."""

    key: ShareKey
    state_epoch: int = 0
    leader_epoch: int = 0
    start_offset: int = 0
    write_token: WriteToken | None = None
    update: Update | None = None


class StateResult(NamedTuple):
    """Result of one entry. `session`, `state` and `summary`: of a read; None for no state."""

    error_code: int = 0
    message: str | None = None
    session: int = 0
    state: LoadedState | None = None
    summary: ShareSummary | None = None


# ---------------------------------------------------------------------- requests


def encode_request(
    api_key: int, sender: RequestSender, state_requests: Sequence[StateRequest], client_id: str
) -> bytes:
    """The framed request, with correlation id 0."""
    group = state_requests[0].key.group
    topics = (
        state_request.key.topic_id
        + encode_array((_encode_partition(api_key, group, state_request),))
        + NO_TAGGED_FIELDS
        for state_request in state_requests
    )
    body = b"".join(
        (
            request_header(api_key, VERSIONS[ApiKey(api_key)], 0, client_id),
            encode_string(group),
            encode_array(topics),
            encode_tagged_fields({_SENDER: _SENDER_FIELDS.pack(*sender)}),
        )
    )
    return len(body).to_bytes(4, "big") + body


def decode_request(api_key: int, body: bytes) -> tuple[RequestSender | None, list[StateRequest]]:
    """Sender and entries; the sender is None if the request does not contain it."""
    with _wire_errors():
        reader = Reader(body, "share state request")
        group = reader.read_string()
        found = reader.read_array(
            lambda: _read_topic(reader, lambda topic: _read_question(api_key, group, topic, reader))
        )
        sender = reader.read_tagged_fields().get(_SENDER)
        reader.check_end()
        known = None if sender is None else RequestSender(*_unpack(reader, _SENDER_FIELDS, sender))
        return known, [state_request for state_requests in found for state_request in state_requests]


def _encode_partition(api_key: int, group: str, state_request: StateRequest) -> bytes:
    key, fields = state_request.key, {}
    if key.group != group:
        fields[_GROUP] = encode_string(key.group)
    if api_key == ApiKey.INITIALIZE_SHARE_GROUP_STATE:
        start = _INIT.pack(key.partition, state_request.state_epoch, state_request.start_offset)
    elif api_key == ApiKey.WRITE_SHARE_GROUP_STATE:
        start, more = _encode_write(state_request)
        fields |= more
    elif api_key == ApiKey.DELETE_SHARE_GROUP_STATE:
        start = _INDEX.pack(key.partition)
    else:
        start = _ASK.pack(key.partition, state_request.leader_epoch)
    return start + encode_tagged_fields(fields)


def _encode_write(state_request: StateRequest) -> tuple[bytes, dict[int, bytes]]:
    update, write_token = state_request.update, state_request.write_token
    assert update is not None, "a write has an update"
    assert write_token is not None, "and in which reading"
    fields = encode_update_tags(update)
    fields.pop(_DONE_IN_RECORDS, None)
    fields[_WRITE_TOKEN] = _WRITE_TOKEN_FIELDS.pack(*write_token)
    if update.durable:
        fields[_DURABLE] = _YES
    if update.is_snapshot:
        fields[_SNAPSHOT] = _YES
    start = _WRITE.pack(
        state_request.key.partition,
        state_request.state_epoch,
        state_request.leader_epoch,
        update.start_offset,
        update.done_count,
    )
    return start + encode_changes(update.changes), fields


def _read_question(api_key: int, group: str, topic_id: bytes, reader: Reader) -> StateRequest:
    state_epoch = leader_epoch = start_offset = 0
    write_token = update = None
    if api_key == ApiKey.INITIALIZE_SHARE_GROUP_STATE:
        index, state_epoch, start_offset = _INIT.unpack(reader.take(_INIT.size))
        fields = reader.read_tagged_fields()
    elif api_key == ApiKey.WRITE_SHARE_GROUP_STATE:
        index, state_epoch, leader_epoch, start_offset, done = _WRITE.unpack(reader.take(_WRITE.size))
        changes = read_changes(reader)
        fields = reader.read_tagged_fields()
        update = decode_update(
            reader, start_offset, changes, fields, snapshot=_SNAPSHOT in fields, durable=_DURABLE in fields
        )._replace(done_count=done)
        if _WRITE_TOKEN not in fields:
            reader.raise_corrupt_log("a write in no reading")
        write_token = WriteToken(*_unpack(reader, _WRITE_TOKEN_FIELDS, fields[_WRITE_TOKEN]))
    elif api_key == ApiKey.DELETE_SHARE_GROUP_STATE:
        (index,) = _INDEX.unpack(reader.take(_INDEX.size))
        fields = reader.read_tagged_fields()
    else:
        index, leader_epoch = _ASK.unpack(reader.take(_ASK.size))
        fields = reader.read_tagged_fields()
    if _GROUP in fields:
        inside = reader.nested_reader(fields[_GROUP])
        group = inside.read_string()
        inside.check_end()
    return StateRequest(
        ShareKey(group, topic_id, index), state_epoch, leader_epoch, start_offset, write_token, update
    )


# ---------------------------------------------------------------------- answers


def encode_response(
    api_key: int, correlation_id: int, state_requests: Sequence[StateRequest], answers: Sequence[StateResult]
) -> bytes:
    """The framed response."""
    topics = (
        state_request.key.topic_id
        + encode_array((_result(api_key, state_request, answer),))
        + NO_TAGGED_FIELDS
        for state_request, answer in zip(state_requests, answers, strict=True)
    )
    return framed_response(
        api_key, VERSIONS[ApiKey(api_key)], correlation_id, encode_array(topics) + NO_TAGGED_FIELDS
    )


def decode_response(api_key: int, frame: bytes) -> list[StateResult]:
    """The results of a frame without its length."""
    _, position = read_response_header(api_key, VERSIONS[ApiKey(api_key)], frame)
    with _wire_errors():
        reader = Reader(bytes(frame[position:]), "share state answer")
        found = reader.read_array(lambda: _read_topic(reader, lambda _: _read_answer(api_key, reader)))
        reader.read_tagged_fields()
        reader.check_end()
        return [answer for answers in found for answer in answers]


def _result(api_key: int, state_request: StateRequest, answer: StateResult) -> bytes:
    start = _RESULT.pack(state_request.key.partition, answer.error_code) + encode_string(answer.message)
    if api_key == ApiKey.READ_SHARE_GROUP_STATE:
        return start + _encode_state(answer)
    if api_key == ApiKey.READ_SHARE_GROUP_STATE_SUMMARY:
        summary = answer.summary
        if summary is None:
            return (
                start
                + _SUMMARY.pack(0, UNCHANGED, UNCHANGED, UNCHANGED)
                + encode_tagged_fields({_ABSENT: _YES})
            )
        return (
            start
            + _SUMMARY.pack(*summary[:4])
            + encode_tagged_fields({_ARCHIVING: _YES} if summary.is_archiving else {})
        )
    return start + NO_TAGGED_FIELDS


def _encode_state(answer: StateResult) -> bytes:
    state = answer.state
    if state is None:
        fields = {_WRITE_TOKEN: _LONG.pack(answer.session), _ABSENT: _YES}
        return _STATE.pack(0, UNCHANGED) + encode_array(()) + encode_tagged_fields(fields)
    whole = Update(
        0,
        durable=False,
        start_offset=state.start_offset,
        lease_bound=state.lease_bound,
        done_count=state.done_count,
        dead_ranges=state.dead_ranges,
        redrives=state.redrives,
        producer=state.producer,
    )
    fields = encode_update_tags(whole)
    fields[_DONE] = fields.pop(_DONE_IN_RECORDS)
    fields[_WRITE_TOKEN] = _LONG.pack(answer.session)
    fields[_EPOCHS] = _TWO.pack(state.leader_epoch, state.snapshot_epoch)
    fields[_WITHHELD] = _LONG.pack(state.withheld_ms)
    if state.is_complete:
        fields[_CERTAIN] = _YES
    return (
        _STATE.pack(state.state_epoch, state.start_offset)
        + encode_changes(state.changes)
        + encode_tagged_fields(fields)
    )


def _read_answer(api_key: int, reader: Reader) -> StateResult:
    _, error_code = _RESULT.unpack(reader.take(_RESULT.size))
    message = reader.read_nullable_string()
    if api_key == ApiKey.READ_SHARE_GROUP_STATE:
        return _read_state(reader, StateResult(error_code, message))
    if api_key == ApiKey.READ_SHARE_GROUP_STATE_SUMMARY:
        found = ShareSummary(*_SUMMARY.unpack(reader.take(_SUMMARY.size)))
        tags_found = reader.read_tagged_fields()
        summary = None if _ABSENT in tags_found else found._replace(is_archiving=_ARCHIVING in tags_found)
        return StateResult(error_code, message, summary=summary)
    reader.read_tagged_fields()
    return StateResult(error_code, message)


def _read_state(reader: Reader, answer: StateResult) -> StateResult:
    state_epoch, start_offset = _STATE.unpack(reader.take(_STATE.size))
    changes, fields = read_changes(reader), reader.read_tagged_fields()
    if answer.error_code:
        return answer
    if not {_WRITE_TOKEN} <= fields.keys():
        reader.raise_corrupt_log("a state without its reading")
    (session,) = _unpack(reader, _LONG, fields[_WRITE_TOKEN])
    if _ABSENT in fields:
        return answer._replace(session=session)
    if not {_EPOCHS, _WITHHELD, _DONE} <= fields.keys():
        reader.raise_corrupt_log("a state that is not whole")
    leader_epoch, snapshot_epoch = _unpack(reader, _TWO, fields[_EPOCHS])
    (withheld_ms,) = _unpack(reader, _LONG, fields[_WITHHELD])
    fields[_DONE_IN_RECORDS] = fields[_DONE]
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
        _CERTAIN in fields,
        withheld_ms,
    )
    return answer._replace(session=session, state=state)


# ---------------------------------------------------------------------- both


def _read_topic(reader: Reader, item: Callable[[bytes], T]) -> tuple[T, ...]:
    topic_id = reader.take(16)
    items = reader.read_array(lambda: item(topic_id))
    reader.read_tagged_fields()
    return items


def _unpack(reader: Reader, shape: Struct, raw: bytes) -> tuple[int, ...]:
    if len(raw) != shape.size:
        reader.raise_corrupt_log("a tagged field of a wrong length")
    return shape.unpack(raw)


@contextmanager
def _wire_errors() -> Iterator[None]:
    try:
        yield
    except CorruptLog as error:
        raise WireError(error.message) from error
