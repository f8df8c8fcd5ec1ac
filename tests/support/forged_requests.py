"""Forged requests: every request that only brokers may send, sent on an ordinary connection with the id and epoch of a
broker.

`INTER_BROKER` is computed from the table of APIs and the schemas of their requests; `FORGERIES` has a forgery for each.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.broker.coordinator.share import state_messages
from mansio.broker.coordinator.share.state_messages import RequestSender, StateRequestEntry
from mansio.broker.coordinator.share.state_store import WriteToken
from mansio.state.broker_handshake import NONCE_BYTES
from mansio.state.share_partition.types import ShareKey
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.apis import fetch
from mansio.wire.codec import messages
from support.raw_peer import RawPeer
from support.share_state_fixtures import begun

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Iterator

    from mansio.wire.codec.schema_compiler import MergedSchema

CLUSTER_AUTHORIZATION_FAILED: Final = 31
CLIENT_ID: Final = "mansio-follower"
BROKER_FIELDS: Final = frozenset({"replica_id", "replica_epoch", "broker_id", "broker_epoch", "node_id"})
"""Fields of requests in which a sender says which broker it is."""
ABSURD_EPOCHS: Final = (1 << 62, (1 << 63) - 1, 0, -1)


def _names(shape: MergedSchema) -> Iterator[str]:
    yield from shape.defaults
    for child in shape.children.values():
        yield from _names(child)


INTER_BROKER: Final = [
    api.key
    for api in SUPPORTED_APIS.values()
    if (
        api.brokers_only
        or api.key is ApiKey.WRITE_TXN_MARKERS  # commits
        or BROKER_FIELDS & set(_names(messages.merged_schema(api.key, messages.REQUEST)))
    )
    and api.key is not ApiKey.UNREGISTER_BROKER  # names a broker, and is of an administrator
]
"""APIs with requests of brokers, from the table and the schemas."""


class Target(NamedTuple):
    """What the forged requests are about: partition 0 of a topic with records up to `end_offset`."""

    topic: str
    topic_id: uuid.UUID
    end_offset: int
    group: str = "forged"

    @property
    def key(self) -> ShareKey:
        return ShareKey(self.group, self.topic_id.bytes, 0)


class Forged(NamedTuple):
    """A forged request, with how it reads the error codes of its answer."""

    frame: bytes
    codes: Callable[[bytes], list[int]]


def _fetches(target: Target, sender: RequestSender) -> Iterator[Forged]:
    """In every version, for repair too, and in the form that followers use; from the start and, as if all were copied,
    from the end."""
    api = SUPPORTED_APIS[ApiKey.FETCH]
    versions = range(api.min_version, api.max_version + 1)
    for version, offset, is_repair_read in itertools.product(versions, (0, target.end_offset), (False, True)):
        if is_repair_read and version < 15:
            continue
        by_id = version >= 13
        partition = fetch.FetchPartition(0, -1, offset, -1, 0, 1 << 20)
        topics: Any = [
            (None if by_id else target.topic, target.topic_id.bytes if by_id else None, [partition])
        ]
        own_fields: dict[str, Any] = (
            {"replica_epoch": sender.broker_epoch, "is_repair_read": is_repair_read} if version >= 15 else {}
        )
        frame = fetch.encode_request(
            version,
            1,
            CLIENT_ID,
            topics,
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=1 << 20,
            replica_id=sender.node_id,
            **own_fields,
        )
        yield Forged(frame, partial(_fetch_codes, version))
    own = fetch.encode_replica_request(
        CLIENT_ID.encode(),
        {target.topic_id.bytes: [fetch.FetchPartition(0, 0, target.end_offset, 0, 0, 1 << 20)]},
        max_wait_ms=0,
        max_bytes=1 << 20,
        replica_id=sender.node_id,
        replica_epoch=sender.broker_epoch,
    )
    yield Forged(own, lambda answer: _fetch_codes(fetch.REPLICA_FETCH_VERSION, answer))


def _fetch_codes(version: int, answer: bytes) -> list[int]:
    response = fetch.decode_response(version, answer)
    partitions = [part for _, _, parts in response.topics for part in parts]
    assert not any(part.records_bytes for part in partitions), "no record is handed out"
    codes = [part.error_code for part in partitions]
    return codes if version < 7 else [response.error_code, *codes]


def _list_offsets(target: Target, sender: RequestSender) -> Iterator[Forged]:
    fields = {
        "replica_id": sender.node_id,
        "topics": [{"name": target.topic, "partitions": [{"partition_index": 0, "timestamp": -1}]}],
    }
    return _in_all_versions(ApiKey.LIST_OFFSETS, fields)


def _leader_epochs(target: Target, sender: RequestSender) -> Iterator[Forged]:
    fields = {
        "replica_id": sender.node_id,
        "topics": [{"topic": target.topic, "partitions": [{"partition": 0, "leader_epoch": 0}]}],
    }
    return (
        forged
        for version, forged in enumerate(_in_all_versions(ApiKey.OFFSET_FOR_LEADER_EPOCH, fields), 2)
        if version >= 3  # before there was no replica id
    )


def _in_all_versions(key: ApiKey, fields: dict[str, Any]) -> Iterator[Forged]:
    for version in range(SUPPORTED_APIS[key].min_version, SUPPORTED_APIS[key].max_version + 1):
        frame = messages.encode_request(key, version, 1, CLIENT_ID, fields)
        yield Forged(frame, partial(_codes, key, version))


def _codes(key: ApiKey, version: int, answer: bytes) -> list[int]:
    _, response = messages.decode_response_frame(key, version, answer)
    if hasattr(response, "error_code"):
        return [response.error_code]
    return [part.error_code for topic in response.topics for part in topic.partitions]


def _markers(target: Target, _: RequestSender) -> Iterator[Forged]:
    """The end of a transaction; the request does not name its sender."""
    key = ApiKey.WRITE_TXN_MARKERS
    for version in range(SUPPORTED_APIS[key].min_version, SUPPORTED_APIS[key].max_version + 1):
        marker = {
            "producer_id": 1,
            "producer_epoch": (1 << 15) - 1,
            "transaction_result": True,
            "coordinator_epoch": 1 << 20,
            "topics": [{"name": target.topic, "partition_indexes": [0]}],
        }
        frame = messages.encode_request(key, version, 1, CLIENT_ID, {"markers": [marker]})
        yield Forged(frame, partial(_marker_codes, version))


def _marker_codes(version: int, answer: bytes) -> list[int]:
    _, response = messages.decode_response_frame(ApiKey.WRITE_TXN_MARKERS, version, answer)
    return [
        part.error_code for marker in response.markers for topic in marker.topics for part in topic.partitions
    ]


def _states(key: ApiKey) -> Callable[[Target, RequestSender], Iterator[Forged]]:
    def forge(target: Target, sender: RequestSender) -> Iterator[Forged]:
        asked = StateRequestEntry(
            target.key,
            state_epoch=1 << 20,
            leader_epoch=1 << 20,
            start_offset=target.end_offset,
            write_token=WriteToken(1, 1),
            update=begun(),
        )
        frame = state_messages.encode_request(key, sender, [asked], CLIENT_ID)
        yield Forged(
            frame,
            lambda answer: [each.error_code for each in state_messages.decode_response(key, answer)],
        )

    return forge


def _challenges(_: Target, __: RequestSender) -> Iterator[Forged]:
    """A challenge with a valid nonce is given to anybody in a cluster; see `tests/system/cluster`."""
    for nonce in (b"", bytes(NONCE_BYTES - 1), bytes(NONCE_BYTES + 1)):
        yield from _in_all_versions(ApiKey.CHALLENGE_BROKER, {"nonce": nonce})


def _authentications(_: Target, sender: RequestSender) -> Iterator[Forged]:
    """Without a challenge before."""
    for proof in (b"", bytes(32)):
        yield from _in_all_versions(ApiKey.AUTHENTICATE_BROKER, {**sender._asdict(), "proof": proof})


def _leases(key: ApiKey, **fields: Any) -> Callable[[Target, RequestSender], Iterator[Forged]]:
    def forge(target: Target, sender: RequestSender) -> Iterator[Forged]:
        topics = (
            {"topics": [target.topic]} if "topics" in messages.merged_schema(key, "request").defaults else {}
        )
        yield from _in_all_versions(key, {**sender._asdict(), "group_id": target.group, **topics, **fields})

    return forge


def _facts(target: Target, sender: RequestSender) -> Iterator[Forged]:
    partition = {"partition_index": 0, "position": 0, "is_led": True}
    fields = {"group_id": target.group, "is_share": True, "sample_ms": 0}
    topics = [{"name": target.topic, "partitions": [partition]}]
    return _in_all_versions(ApiKey.COLLECT_GROUP_FACTS, {**sender._asdict(), **fields, "topics": topics})


def _confirmations(_: Target, sender: RequestSender) -> Iterator[Forged]:
    """The session that would end is the one of the sender, as good as any."""
    suspect = {"suspect_id": sender.node_id, "suspect_epoch": sender.broker_epoch}
    return _in_all_versions(ApiKey.CONFIRM_HAND_OVER, {**sender._asdict(), **suspect})


def _trace_reads(target: Target, sender: RequestSender) -> Iterator[Forged]:
    """The rows about a record, and the last record that failed in a group."""
    record = {"topic_id": target.topic_id, "partition_index": 0, "offset": 0, "accepted_offset": -1}
    for facts in (False, True):
        fields = {**sender._asdict(), **record, "needs_facts": facts}
        yield from _in_all_versions(ApiKey.READ_TRACE, fields)
        yield from _in_all_versions(ApiKey.READ_TRACE, {**fields, "failed_group": target.group})


def _rates(target: Target, sender: RequestSender) -> Iterator[Forged]:
    return _in_all_versions(
        ApiKey.DESCRIBE_PARTITION_RATES, {**sender._asdict(), "topic_ids": [target.topic_id]}
    )


def _forwarded(target: Target, sender: RequestSender) -> Iterator[Forged]:
    """A request that any client may send, and one that only brokers may, as a client's and as the broker's own."""
    metadata = messages.encode_request(ApiKey.METADATA, 9, 1, CLIENT_ID, {"topics": [{"name": target.topic}]})
    fetches = [each.frame for each in _fetches(target, sender)]
    for frame in (metadata, fetches[-1]):
        for is_own in (False, True):
            fields = {
                **sender._asdict(),
                "is_own": is_own,
                "client_address": "10.0.0.1",
                "user": "admin",
                "listener": "",
                "credential_revision": 1,
                "request": frame[4:],
            }
            yield from _in_all_versions(ApiKey.FORWARD_REQUEST, fields)


FORGERIES: Final[dict[ApiKey, Callable[[Target, RequestSender], Iterator[Forged]]]] = {
    ApiKey.FETCH: _fetches,
    ApiKey.LIST_OFFSETS: _list_offsets,
    ApiKey.OFFSET_FOR_LEADER_EPOCH: _leader_epochs,
    ApiKey.WRITE_TXN_MARKERS: _markers,
    ApiKey.INITIALIZE_SHARE_GROUP_STATE: _states(ApiKey.INITIALIZE_SHARE_GROUP_STATE),
    ApiKey.READ_SHARE_GROUP_STATE: _states(ApiKey.READ_SHARE_GROUP_STATE),
    ApiKey.WRITE_SHARE_GROUP_STATE: _states(ApiKey.WRITE_SHARE_GROUP_STATE),
    ApiKey.DELETE_SHARE_GROUP_STATE: _states(ApiKey.DELETE_SHARE_GROUP_STATE),
    ApiKey.READ_SHARE_GROUP_STATE_SUMMARY: _states(ApiKey.READ_SHARE_GROUP_STATE_SUMMARY),
    ApiKey.CHALLENGE_BROKER: _challenges,
    ApiKey.AUTHENTICATE_BROKER: _authentications,
    ApiKey.RECEIVE_RECORDS: _leases(
        ApiKey.RECEIVE_RECORDS,
        member_id="00" * 16,
        records_max=10,
        bytes_max=1 << 20,
        wait_ms=0,
    ),
    ApiKey.RELEASE_LEASES: _leases(ApiKey.RELEASE_LEASES, member_id="00" * 16),
    ApiKey.REGISTER_SHARE_GROUP: _leases(ApiKey.REGISTER_SHARE_GROUP),
    ApiKey.FORWARD_REQUEST: _forwarded,
    ApiKey.CONFIRM_HAND_OVER: _confirmations,
    ApiKey.READ_TRACE: _trace_reads,
    ApiKey.COLLECT_GROUP_FACTS: _facts,
    ApiKey.DESCRIBE_PARTITION_RATES: _rates,
}


def check_refused(port: int, key: ApiKey, target: Target, sender: RequestSender) -> int:
    """Send every forgery of an API, each on a connection of its own; all have to be refused. Returns their number."""
    count = 0
    for forged in FORGERIES[key](target, sender):
        with RawPeer(port) as peer:
            answer = send_frame(peer, forged.frame)
            codes = forged.codes(answer)
            assert set(codes) == {CLUSTER_AUTHORIZATION_FAILED}, (key.name, sender, codes)
        count += 1
    assert count, f"{key.name}: nothing was forged"
    return count


def send_frame(peer: RawPeer, frame: bytes) -> bytes:
    """The answer to one request."""
    peer.send(frame)
    answer = peer.frame()
    assert answer is not None, "the broker closed the connection without an answer"
    return answer
