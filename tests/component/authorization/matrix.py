"""The cases of the matrix of rights: what the request of each Kafka API needs, the credentials with which it is asked,
and a broker with what the requests name."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from component.authorization.requests import Named, decode, encode, error_codes, query_of
from mansio.api.required_rights import ERROR_CODES, KAFKA, Place
from mansio.errors import TopicAuthorizationFailed
from mansio.state.authorization.acls import (
    CLUSTER_NAME,
    WILDCARD,
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.query_transactional_ids import task_transactional_id, transactional_id_prefix
from support.raw_peer import RawPeer, batch_of
from support.sasl_broker import log_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mansio.api.required_rights import Need, Right

SCRAM = "SCRAM-SHA-256"
PASSWORD = "correct horse"
HOST = "127.0.0.1"
OTHER_HOST = "10.9.9.9"
NO_TOPIC: Final = frozenset({TopicAuthorizationFailed.kafka_code})
REFUSALS: Final = frozenset(ERROR_CODES.values())
UNKNOWN_TOPIC_ID: Final = 100
LOADING: Final = frozenset({14, 15, 16})
"""Codes of a coordinator that is not ready."""
IN_USE: Final = frozenset({25, 51})
"""Codes of a group that has members and of a transaction that is open: both exist."""

PER_CONNECTION: Final = frozenset(
    {
        ApiKey.SASL_HANDSHAKE,
        ApiKey.SASL_AUTHENTICATE,
        ApiKey.CHALLENGE_BROKER,
        ApiKey.AUTHENTICATE_BROKER,
    }
)
"""APIs that change the connection itself; they need no right."""

BROKERS_ONLY_FROM: Final = {ApiKey.ADD_PARTITIONS_TO_TXN: 4}
"""Versions from which on the request of the matrix needs the identity of a broker."""

NEEDS: Final[dict[ApiKey, Sequence[int]]] = {
    ApiKey.PRODUCE: (0,),
    ApiKey.METADATA: (0,),
    ApiKey.OFFSET_FETCH: (0, 1),
    ApiKey.FIND_COORDINATOR: (0,),
    ApiKey.INIT_PRODUCER_ID: (0,),
    ApiKey.ADD_PARTITIONS_TO_TXN: (0, 1),
    ApiKey.DESCRIBE_CONFIGS: (0,),
    ApiKey.ALTER_CONFIGS: (0,),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: (0,),
    ApiKey.DESCRIBE_TRANSACTIONS: (0,),
    ApiKey.CONSUMER_GROUP_HEARTBEAT: (0, 1),
    ApiKey.CONSUMER_GROUP_DESCRIBE: (0,),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: (0,),
    ApiKey.SHARE_GROUP_HEARTBEAT: (0, 1),
    ApiKey.SHARE_GROUP_DESCRIBE: (0,),
    ApiKey.SHARE_ACKNOWLEDGE: (0,),
    ApiKey.REDRIVE_RECORDS: (0, 1),
    ApiKey.TRACE_RECORD: (0,),
    ApiKey.DESCRIBE_SCHEMAS: (0,),  # others: `tests/component/registry/test_schema_rights.py`
    ApiKey.ALTER_SCHEMAS: (0,),
    ApiKey.EXPLAIN_GROUP: (0,),  # its topics: `tests/component/why/test_rights.py`
    ApiKey.SET_PASSWORD: (0,),
    ApiKey.CREATE_DELEGATION_TOKEN: (),
    ApiKey.DESCRIBE_DELEGATION_TOKEN: (),
}
"""Those needs of an API that its request in this matrix has; all for others."""

GRANTED: Final = {
    ApiKey.CONSUMER_GROUP_DESCRIBE: (1,),
    ApiKey.SHARE_GROUP_DESCRIBE: (1,),
    ApiKey.SHARE_ACKNOWLEDGE: (1,),
}
"""Needs that all credentials have, because they depend on what other requests have done to the group or
its share session."""

EXISTING, ABSENT = "exists", "absent"
"""Parts of the names, of one length, so that answers can be compared."""
APIS: Final = [key for key in SUPPORTED_APIS if key not in PER_CONNECTION]
ASKED: Final = [key for key in APIS if NEEDS.get(key, KAFKA[key].needs)]
"""APIs whose request in this matrix needs a right. Those of delegation tokens do not, as each is about an own token."""


class Credential(NamedTuple):
    """ACLs of alice for the needs of a request. `refused`: the codes of which the answer has at least one, None if the
    request is allowed."""

    name: str
    acls: list[Acl]
    refused: frozenset[int] | None
    omits: bool = False


def needs_of(key: ApiKey) -> list[Need]:
    needs = KAFKA[key].needs
    return [needs[index] for index in NEEDS.get(key, range(len(needs)))]


def allow(
    right: Right,
    named: Named,
    *,
    suffix: str = "",
    pattern: PatternType = PatternType.LITERAL,
    host: str = WILDCARD,
    permission: Permission = Permission.ALLOW,
) -> Acl:
    name = {
        ResourceType.TOPIC: named.topic,
        ResourceType.SUBJECT: named.topic,
        ResourceType.GROUP: named.group,
        ResourceType.TRANSACTIONAL_ID: named.transactional_id,
        ResourceType.CLUSTER: CLUSTER_NAME,
        ResourceType.USER: "alice",
        ResourceType.DELEGATION_TOKEN: "token",
    }[right.resource_type]
    if right.resource_type is ResourceType.CLUSTER:  # it has one name
        pattern = PatternType.LITERAL
    else:
        name = name[: len(name) - 2] if pattern is PatternType.PREFIXED else name + suffix
    return Acl(right.resource_type, pattern, name, "User:alice", host, right.operation, permission)


def credentials(key: ApiKey, named: Named) -> Iterator[Credential]:
    """Yield the credentials of the matrix for an API that differ in their ACLs."""
    granted = [allow(KAFKA[key].needs[index].rights[-1], named) for index in GRANTED.get(key, ())]
    if key is ApiKey.COMMIT_BATCH:  # it names transactions, too, but what it changes is the query
        write = KAFKA[key].needs[0].rights[-1]
        query_id = query_of(named)
        task = named._replace(transactional_id=task_transactional_id(query_id, 0, 0))
        granted = [allow(write, task)]
        named = named._replace(transactional_id=transactional_id_prefix(query_id))
    for each in _credentials(needs_of(key), named):
        yield each._replace(acls=[*each.acls, *granted])


def _credentials(needs: Sequence[Need], named: Named) -> Iterator[Credential]:
    wanted = [need.rights[-1] for need in needs]
    codes = frozenset(need.error_code for need in needs)
    omits = any(need.place is Place.OMITTED for need in needs)
    exact = [allow(right, named) for right in wanted]
    yield Credential("no right", [], codes, omits)
    yield Credential("exact", exact, None)
    denials = [allow(right, named, permission=Permission.DENY) for right in wanted[:1]]
    yield Credential("exact and deny", exact + denials, frozenset({needs[0].error_code}), omits)
    for left_out, need in enumerate(needs) if len(needs) > 1 else ():
        acls = exact[:left_out] + exact[left_out + 1 :]
        yield Credential(f"all but {need.rights[-1]}", acls, frozenset({need.error_code}), omits)
    named_codes = codes - {ERROR_CODES[ResourceType.CLUSTER]}
    if named_codes:
        siblings = [allow(right, named, suffix="x") for right in wanted]
        yield Credential("sibling", siblings, named_codes, omits)
    yield Credential("prefix", [allow(right, named, pattern=PatternType.PREFIXED) for right in wanted], None)
    yield Credential("wrong host", [allow(right, named, host=OTHER_HOST) for right in wanted], codes, omits)
    yield Credential("host", [allow(right, named, host=HOST) for right in wanted], None)
    if any(right.operation is not Operation.DESCRIBE for right in wanted):
        describing = [allow(right._replace(operation=Operation.DESCRIBE), named) for right in wanted]
        yield Credential("describe only", describing, codes)
    for need in needs:
        for right in need.rights[:-1]:
            others = [each for each in exact if each.resource_type is not need.rights[-1].resource_type]
            yield Credential(f"by {right}", [*others, allow(right, named)], None)


class Room(ABC):
    """A broker that authorizes with the super user admin, what exists on it, and a connection of each user."""

    def __init__(self, port: int, mechanism: str) -> None:
        self.port = port
        self._mechanism = mechanism
        self.peers = {name: self.connect(name) for name in ("alice", "admin")}
        self._numbers = itertools.count(1)
        self.named = {ABSENT: Named("t-absent", b"\7" * 16, "g-absent", "x-absent")}
        self.create()

    @abstractmethod
    def set_acls(self, acls: Iterable[Acl]) -> None:
        """Let the authorizer have these ACLs and no others."""

    def connect(self, user: str) -> RawPeer:
        peer = RawPeer(self.port)
        assert log_in(peer, self._mechanism, user, PASSWORD).error_code == 0
        return peer

    def close(self) -> None:
        for peer in self.peers.values():
            peer.socket.close()

    def create(self) -> None:
        """Create what exists, as far as a request has deleted it."""
        admin = self.peers["admin"]
        asked = {"topics": [{"topic_id": None, "name": "t-exists"}], "allow_auto_topic_creation": False}
        topic = admin.call(ApiKey.METADATA, 12, asked).topics[0]
        if topic.error_code:
            admin.create_topic("t-exists")
            while (topic := admin.call(ApiKey.METADATA, 12, asked).topics[0]).error_code:
                pass
            while admin.produce("t-exists", batch_of(b"v")).error_code:
                pass
        self.named[EXISTING] = Named("t-exists", topic.topic_id, "g-exists", "x-exists")
        commit = {"partition_index": 0, "committed_offset": 0, "committed_leader_epoch": -1}
        fields = {
            "group_id": "g-exists",
            "generation_id_or_member_epoch": -1,
            "topics": [{"name": "t-exists", "partitions": [commit]}],
        }
        self._until_served(ApiKey.FIND_COORDINATOR, 3, {"key": "g-exists", "key_type": 0})
        self._until_served(ApiKey.OFFSET_COMMIT, 8, fields)
        self._until_served(ApiKey.FIND_COORDINATOR, 3, {"key": "x-exists", "key_type": 1})
        begin = {"transactional_id": "x-exists", "transaction_timeout_ms": 60_000}
        self._until_served(ApiKey.INIT_PRODUCER_ID, 4, begin | {"producer_id": -1, "producer_epoch": -1})

    def _until_served(self, key: ApiKey, version: int, fields: dict[str, Any]) -> None:
        """Ask as the super user until the coordinator has loaded."""
        while (codes := error_codes(self.peers["admin"].call(key, version, fields))) & LOADING:
            pass
        assert codes <= IN_USE, f"{key.name}: {codes}"

    def ask(self, user: str, key: ApiKey, version: int, named: Named) -> tuple[bytes, Any]:
        """Send the request of the matrix; return its answer as bytes, without the correlation id, and decoded."""
        peer = self.peers[user]
        peer.send(encode(key, version, next(self._numbers), named))
        frame = peer.frame()
        if frame is None:
            peer.socket.close()
            self.peers[user] = self.connect(user)
        assert frame is not None, f"the connection was closed instead of an answer to {key.name}"
        return frame[4:], decode(key, version, frame)


def versions_of(key: ApiKey) -> list[int]:
    api = SUPPORTED_APIS[key]
    return sorted({api.min_version, api.max_version})


def is_for_brokers(key: ApiKey, version: int) -> bool:
    from_version = BROKERS_ONLY_FROM.get(key)
    return KAFKA[key].brokers_only or (from_version is not None and version >= from_version)
