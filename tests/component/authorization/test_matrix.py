"""Each Kafka API, asked with each kind of right: who lacks one is refused with Kafka's code, changes nothing and learns
nothing, and who has them all is not refused.

The APIs and what they need come from the table `mansio.api.required_rights`, so an API without a row fails here, too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from component.authorization.matrix import (
    ABSENT,
    APIS,
    ASKED,
    EXISTING,
    NO_TOPIC,
    PASSWORD,
    REFUSALS,
    UNKNOWN_TOPIC_ID,
    Credential,
    Room,
    credentials,
    is_for_brokers,
    needs_of,
    versions_of,
)
from component.authorization.requests import encode, encode_empty, error_codes, names_topics_by_id
from component.authorization.visible_state import names_of_state, visible_state
from mansio.api.kafka.handlers import acls
from mansio.api.kafka.server.authorization_table import ADMINISTRATIVE
from mansio.api.required_rights import KAFKA, Effect, Place
from mansio.broker.services.audit.audit_service import REFUSED, AuditService
from mansio.errors import (
    ClusterAuthorizationFailed,
    GroupIdNotFound,
    InvalidRequest,
    NonEmptyGroup,
    UnknownTopicOrPartition,
)
from mansio.state.authorization.acls import AclFilter, Operation, ResourceType
from mansio.state.authorization.authorizer import GROUPS_MAX
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from support.authorization import PEER, acl
from support.raw_peer import RawPeer
from support.sasl_broker import SaslBroker, sasl_broker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mansio.broker.routing.caller import Caller
    from mansio.state.authorization.acls import Acl

SCRAM = "SCRAM-SHA-256"
GROUP_ERRORS = {GroupIdNotFound.kafka_code, NonEmptyGroup.kafka_code}


class MansioRoom(Room):
    """A broker of Mansio, whose authorizer is changed directly."""

    def __init__(self, broker: SaslBroker) -> None:
        self.broker = broker
        self.audited: list[tuple[str, str]] = []
        self._authorizer = broker.broker.service.acls._authorization.authorizer
        for name in ("alice", "admin", "carol"):
            broker.set_user(name, PASSWORD)
        super().__init__(broker.port, SCRAM)
        if "PLAINTEXT" in broker.broker.listener_addresses:
            self.peers["ANONYMOUS"] = RawPeer(broker.broker.listener_addresses["PLAINTEXT"].port)

    def set_acls(self, acls: Iterable[Acl]) -> None:
        wanted = list(acls)

        def change() -> None:
            for each in set(self._authorizer.acls_of(None)) - set(wanted):
                self._authorizer.remove(each)
            for each in wanted:
                self._authorizer.add(each)

        self.broker.call(change)

    def fingerprint(self) -> Any:
        """Return what a refused request must not change."""

        return self.broker.call(visible_state, self.broker.broker.service)


@pytest.fixture(scope="module")
def audited() -> Iterator[list[tuple[str, str]]]:
    """Principals and APIs of the refusals that were audited."""
    found: list[tuple[str, str]] = []
    add = AuditService._add

    def recording(service: AuditService, caller: Caller, outcome: str, *more: Any) -> None:
        if outcome == REFUSED:
            found.append((caller.session.principal, caller.api))
        add(service, caller, outcome, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AuditService, "_add", recording)
        yield found


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, audited: list[tuple[str, str]]) -> Iterator[MansioRoom]:
    settings = {
        "listeners": "SASL_PLAINTEXT://127.0.0.1:0,PLAINTEXT://127.0.0.1:0",
        "open_listeners": "PLAINTEXT",
        "authorizer": "acl",
        "super_users": "User:admin",
        "transaction_state_log_num_partitions": 1,
        "auto_create_topics_enable": False,
    }
    with sasl_broker(tmp_path_factory.mktemp("matrix") / "data", **settings) as broker:
        made = MansioRoom(broker)
        made.audited = audited
        yield made
        made.close()


def check_refused(
    room: MansioRoom, key: ApiKey, version: int, credential: Credential, resource: str
) -> bytes:
    named = room.named[resource]
    room.set_acls(credential.acls)
    before = room.fingerprint()
    room.audited.clear()
    raw, answer = room.ask("alice", key, version, named)
    assert room.fingerprint() == before, "a refused request changed something"
    codes = error_codes(answer)
    if credential.name == "no right" and names_topics_by_id(key, version):
        assert named.topic.encode() not in raw, "who has only the id learns the name"
    if codes & REFUSALS:
        assert set(room.audited) == {("User:alice", key.name)}, "it is not audited"
    if not codes and (credential.omits or (key, version < 3) == (ApiKey.DESCRIBE_LOG_DIRS, True)):
        assert named.topic.encode() not in raw
        assert named.group.encode() not in raw
        assert named.transactional_id.encode() not in raw
    elif codes and codes <= GROUP_ERRORS and credential.refused == NO_TOPIC:
        pass  # the caller has the right for the group, which is of another type, or has members
    elif codes == {UnknownTopicOrPartition.kafka_code} and (key, resource) == (ApiKey.DELETE_TOPICS, ABSENT):
        assert credential.acls, "who may describe a topic may know that it does not exist, as in Kafka"
    elif names_topics_by_id(key, version) and resource == ABSENT and UNKNOWN_TOPIC_ID in codes:
        pass  # a topic id that does not exist is no secret, as in Kafka
    else:
        assert codes & REFUSALS, f"not refused: {codes}"
        assert credential.refused is not None
        assert codes & REFUSALS <= credential.refused, codes
    return raw


def check_allowed(
    room: MansioRoom, key: ApiKey, version: int, user: str, acls: list[Acl], resource: str
) -> None:
    room.set_acls(acls)
    raw, answer = room.ask(user, key, version, room.named[resource])
    assert not error_codes(answer) & REFUSALS, answer
    if resource == EXISTING and any(need.place is Place.OMITTED for need in needs_of(key)):
        assert b"exists" in raw


def test_every_api_that_needs_a_right_is_asked() -> None:
    assert set(APIS) - set(ASKED) == {
        ApiKey.API_VERSIONS,
        ApiKey.DESCRIBE_CLUSTER,
        ApiKey.CREATE_DELEGATION_TOKEN,
        ApiKey.RENEW_DELEGATION_TOKEN,
        ApiKey.EXPIRE_DELEGATION_TOKEN,
        ApiKey.DESCRIBE_DELEGATION_TOKEN,
    }


@pytest.mark.parametrize("key", ASKED, ids=lambda key: key.name.lower())
def test_without_a_right_a_request_is_refused_and_with_all_of_them_it_is_not(
    room: MansioRoom, key: ApiKey
) -> None:
    version = SUPPORTED_APIS[key].max_version
    if is_for_brokers(key, version):
        version = SUPPORTED_APIS[key].min_version
    if is_for_brokers(key, version):
        check_for_brokers_only(room, key, version)
        return
    room.create()
    found = {each.name: each for each in credentials(key, room.named[EXISTING])}
    for name in ("no right", "exact and deny"):
        check_refused(room, key, version, found[name], EXISTING)
    check_allowed(room, key, version, "alice", found["exact"].acls, EXISTING)


@pytest.mark.full
@pytest.mark.parametrize("key", ASKED, ids=lambda key: key.name.lower())
def test_each_kind_of_right_counts_in_each_version(room: MansioRoom, key: ApiKey) -> None:
    for version in versions_of(key):
        if is_for_brokers(key, version):
            check_for_brokers_only(room, key, version)
            continue
        room.create()
        for resource in (EXISTING, ABSENT):
            for each in credentials(key, room.named[resource]):
                if each.refused is not None:
                    check_refused(room, key, version, each, resource)
        for resource in (ABSENT, EXISTING):
            for each in credentials(key, room.named[resource]):
                if each.refused is None:
                    room.create()
                    check_allowed(room, key, version, "alice", each.acls, resource)
            room.create()
            check_allowed(room, key, version, "admin", [], resource)


def test_a_request_with_empty_lists_and_without_a_right_changes_nothing(room: MansioRoom) -> None:
    service = room.broker.broker.service
    room.set_acls([])
    before, known = room.fingerprint(), room.broker.call(names_of_state, service)
    for key in ASKED:
        for version in versions_of(key):
            request = encode_empty(key, version, 1, room.named[ABSENT])
            if request is None:
                continue
            peer = room.peers["alice"]
            peer.send(request)
            if peer.frame() is None:
                room.peers["alice"] = room.connect("alice")
            assert room.broker.call(names_of_state, service) <= known, key.name
    assert room.fingerprint() == before


@pytest.mark.full
@pytest.mark.parametrize("key", ASKED, ids=lambda key: key.name.lower())
def test_a_refusal_does_not_tell_whether_the_resource_exists(room: MansioRoom, key: ApiKey) -> None:
    room.create()
    for version in versions_of(key):
        if is_for_brokers(key, version) or names_topics_by_id(key, version):
            continue
        refused = Credential("no right", [], REFUSALS, omits=True)
        exists, absent = (check_refused(room, key, version, refused, each) for each in (EXISTING, ABSENT))
        assert exists == absent.replace(ABSENT.encode(), EXISTING.encode())


def check_for_brokers_only(room: MansioRoom, key: ApiKey, version: int) -> None:
    """Even the super user is no broker."""
    before = room.fingerprint()
    room.set_acls([])
    for user in room.peers:
        _, answer = room.ask(user, key, version, room.named[EXISTING])
        assert error_codes(answer) & {ClusterAuthorizationFailed.kafka_code}, answer
    assert room.fingerprint() == before


@pytest.mark.full
@pytest.mark.parametrize("key", ASKED, ids=lambda key: key.name.lower())
def test_who_has_not_logged_in_on_an_open_listener_has_no_rights_of_others(
    room: MansioRoom, key: ApiKey
) -> None:
    room.create()
    exact = next(each for each in credentials(key, room.named[EXISTING]) if each.refused is None)
    for version in versions_of(key):
        if is_for_brokers(key, version):
            continue
        room.set_acls(exact.acls)
        before = room.fingerprint()
        raw, answer = room.ask("ANONYMOUS", key, version, room.named[EXISTING])
        assert room.fingerprint() == before
        assert error_codes(answer) & REFUSALS or b"exists" not in raw, answer


@pytest.mark.full
def test_a_deleted_user_is_served_no_request(room: MansioRoom) -> None:
    room.broker.set_user("mallory", PASSWORD)
    peers = {key: room.connect("mallory") for key in ASKED}
    room.broker.delete_user("mallory")
    before = room.fingerprint()
    for key, peer in peers.items():
        with contextlib.suppress(OSError):  # it is closed already
            peer.send(encode(key, SUPPORTED_APIS[key].max_version, 1, room.named[EXISTING]))
        assert peer.closed(), key.name
        peer.socket.close()
    assert room.fingerprint() == before


def test_a_large_list_of_acls_is_described_as_a_small_one_is(
    room: MansioRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = room.broker.broker.service.acls
    added = [acl(ResourceType.TOPIC, name, Operation.READ) for name in ("a", "b")]
    assert room.broker.run(service.create_each(added, caller=PEER)) == [None, None]
    asked = {"resource_type_filter": 1, "pattern_type_filter": 1, "operation": 1, "permission_type": 1}
    known = room.peers["admin"].call(ApiKey.DESCRIBE_ACLS, 3, asked)
    assert [each.resource_name for each in known.resources] == ["a", "b"]
    monkeypatch.setattr(acls, "ENCODED_ACLS_MAX", 1)
    assert vars(room.peers["admin"].call(ApiKey.DESCRIBE_ACLS, 3, asked)) == vars(known)
    assert room.broker.run(service.delete_each([AclFilter()], caller=PEER)) == [added]


def test_groups_that_would_not_count_are_refused_by_a_check_of_rights(room: MansioRoom) -> None:
    query = {"operation": 3, "resource_type": 2, "resource_name": "t-exists"}
    asked = {"user": "alice", "host": "127.0.0.1", "queries": [query]}
    for count, code in ((GROUPS_MAX, 0), (GROUPS_MAX + 1, InvalidRequest.kafka_code)):
        groups = [f"g{number}" for number in range(count)]
        answer = room.peers["admin"].call(ApiKey.CHECK_AUTHORIZATION, 0, asked | {"groups": groups})
        assert answer.error_code == code


def test_a_refusal_has_its_error_at_the_top_and_in_each_item_as_in_kafka(room: MansioRoom) -> None:
    room.set_acls([])
    alice, refused = room.peers["alice"], ClusterAuthorizationFailed.kafka_code
    users = {"users": [{"name": "carol"}, {"name": "nobody"}]}
    described = alice.call(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, users)
    assert (described.error_code, described.error_message is None) == (refused, False)
    nameless = {"user": "", "error_code": refused, "error_message": None, "credential_infos": []}
    assert [vars(each) for each in described.results] == [nameless, nameless]
    partitions = [{"topic": "t-exists", "partitions": [0, 7]}]
    asked = {"election_type": 0, "topic_partitions": partitions, "timeout_ms": 1000}
    elected = alice.call(ApiKey.ELECT_LEADERS, 2, asked)
    assert elected.error_code == refused
    (topic,) = elected.replica_election_results
    assert [(each.partition_id, each.error_code) for each in topic.partition_result] == [
        (0, refused),
        (7, refused),
    ]
    moved = [{"name": "t-exists", "partitions": [{"partition_index": 0, "replicas": [1]}]}]
    for version in (0, 1):
        answer = alice.call(
            ApiKey.ALTER_PARTITION_REASSIGNMENTS, version, {"timeout_ms": 1000, "topics": moved}
        )
        assert (answer.error_code, answer.error_message is None) == (refused, False)
        assert answer.responses[0].partitions[0].error_code == refused


def test_a_refusal_to_describe_all_users_names_none(room: MansioRoom) -> None:
    room.set_acls([])
    everyone: tuple[dict[str, Any], ...] = ({"users": []}, {"users": None})
    for fields in everyone:
        answer = room.peers["alice"].call(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, fields)
        assert (answer.error_code, answer.results) == (ClusterAuthorizationFailed.kafka_code, [])


def test_what_administers_is_audited() -> None:
    administering = {key for key, row in KAFKA.items() if row.effect is Effect.ADMINISTERS}
    assert set(ADMINISTRATIVE) == administering
