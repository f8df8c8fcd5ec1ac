"""The group coordinator and its handlers, on virtual time: what members receive, what is stored, what survives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from mansio.api.kafka.connections.request_context import RequestContext
from mansio.api.kafka.handlers import groups as group_handlers
from mansio.api.kafka.handlers import offsets as offset_handlers
from mansio.broker.coordinator.group.group_coordinator import GroupCoordinator, GroupSettings
from mansio.broker.routing.routes import java_string_hash
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.groups import GroupService
from mansio.errors import StorageError
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.codec import messages
from support.listeners import served_listener
from support.no_transactions import NoCoordinator
from unit.broker.groups_fixtures import MemoryPartition, VirtualScheduler

if TYPE_CHECKING:
    from mansio.broker.services.broker_services import BrokerServices

GROUP_APIS = {
    ApiKey.FIND_COORDINATOR: group_handlers.find_coordinator,
    ApiKey.JOIN_GROUP: group_handlers.join_group,
    ApiKey.SYNC_GROUP: group_handlers.sync_group,
    ApiKey.HEARTBEAT: group_handlers.heartbeat,
    ApiKey.LEAVE_GROUP: group_handlers.leave_group,
    ApiKey.DESCRIBE_GROUPS: group_handlers.describe_groups,
    ApiKey.LIST_GROUPS: group_handlers.list_groups,
    ApiKey.DELETE_GROUPS: group_handlers.delete_groups,
    ApiKey.OFFSET_COMMIT: offset_handlers.offset_commit,
    ApiKey.OFFSET_FETCH: offset_handlers.offset_fetch,
    ApiKey.OFFSET_DELETE: offset_handlers.offset_delete,
}
PARTITIONS = 3
COORDINATOR_NOT_AVAILABLE = 15
INVALID_REQUEST = 42
SUBSCRIPTION = bytes.fromhex("0000 00000001 0001 74 ffffffff")  # reads topic "t"
ASSIGNMENT = bytes.fromhex("0000 00000001 0001 74 00000001 00000000 ffffffff")  # t-0


class Chance:
    def __init__(self) -> None:
        self.count = 0

    def bytes(self, length: int) -> bytes:
        self.count += 1
        return self.count.to_bytes(length, "big")

    def uniform(self, low: float, high: float) -> float:
        return low


class Broker:
    """A coordinator with its handlers; `call` goes through the wire codec in both directions."""

    def __init__(self, partitions: list[MemoryPartition] | None = None, **settings: Any) -> None:
        self.scheduler = VirtualScheduler()
        if partitions is not None:
            partitions = [each.after_power_loss(self.scheduler) for each in partitions]
        self.partitions = partitions or []
        self.node_id = 1
        self.settings = self  # the handlers ask the service for `settings.node_id`
        self.groups = GroupCoordinator(
            settings=GroupSettings(**settings),
            clock=self.scheduler,
            scheduler=self.scheduler,
            random=Chance(),
            create_topic=self.create,
            end_offset=lambda topic, partition: 100 if (topic, partition) in (("t", 0), ("t", 1)) else None,
        )
        self.group_service = GroupService(
            self.groups, node_id=self.node_id, verifier=NoCoordinator(), authorization=Authorization(None)
        )
        self.scheduler.run(self.groups.start(self.partitions))

    async def create(self) -> list[MemoryPartition]:
        self.partitions = [MemoryPartition(self.scheduler) for _ in range(PARTITIONS)]
        return self.partitions

    def restarted(self) -> Broker:
        return Broker(self.partitions)

    def begin(self, api: ApiKey, version: int | None = None, **fields: Any) -> Any:
        """Start a request; the promise of its response."""
        version = SUPPORTED_APIS[api].max_version if version is None else version
        context = RequestContext(
            int(api), version, 7, "client", "10.0.0.1", served_listener(node_id=self.node_id)
        )
        frame = messages.encode_request(int(api), version, 7, "client", fields)
        request = messages.decode_request(int(api), version, _body(frame, api, version))

        async def work() -> Any:
            answer = await GROUP_APIS[api](cast("BrokerServices", self), request, context)
            encoded = messages.encode_response(int(api), version, 7, answer)
            return messages.decode_response_frame(int(api), version, encoded[4:])[1]

        return self.scheduler.start(work())

    def call(self, api: ApiKey, version: int | None = None, **fields: Any) -> Any:
        promise = self.begin(api, version, **fields)

        async def wait() -> Any:
            return await promise

        return self.scheduler.run(wait(), limit_ms=100_000)

    def join(self, member_id: str = "", *, version: int = 9, **fields: Any) -> Any:
        return self.begin(
            ApiKey.JOIN_GROUP,
            version,
            **{
                "group_id": "g",
                "session_timeout_ms": 10_000,
                "rebalance_timeout_ms": 60_000,
                "member_id": member_id,
                "protocol_type": "consumer",
                "protocols": [{"name": "range", "metadata": SUBSCRIPTION}],
                **fields,
            },
        )

    def sync(self, joined: Any, **fields: Any) -> Any:
        assignments = []
        if joined.leader == joined.member_id:
            assignments = [{"member_id": each.member_id, "assignment": ASSIGNMENT} for each in joined.members]
        identity = {"group_id": "g", "generation_id": joined.generation_id, "member_id": joined.member_id}
        return self.begin(ApiKey.SYNC_GROUP, **identity, assignments=assignments, **fields)

    def stable(self) -> Any:
        """One member in a stable group; its join answer."""
        given = self.join().result()
        assert given.error_code == 79
        joining = self.join(given.member_id)
        self.scheduler.pass_time(200)
        joined = joining.result()
        syncing = self.sync(joined)
        self.scheduler.turn()
        assert syncing.result().assignment == ASSIGNMENT
        return joined

    def heartbeat(self, joined: Any) -> int:
        return self.call(
            ApiKey.HEARTBEAT, group_id="g", generation_id=joined.generation_id, member_id=joined.member_id
        ).error_code

    def commit(self, offset: int, joined: Any = None, **fields: Any) -> Any:
        return self.begin(ApiKey.OFFSET_COMMIT, **commit_fields(offset, joined, **fields))

    def committed(self, group_id: str = "g") -> dict[tuple[str, int], int]:
        answer = self.call(ApiKey.OFFSET_FETCH, groups=[{"group_id": group_id, "topics": None}])
        return {
            (topic.name, each.partition_index): each.committed_offset
            for topic in answer.groups[0].topics
            for each in topic.partitions
        }

    def stored_bytes(self) -> int:
        return sum(len(each) for partition in self.partitions for each in partition.stored)


def commit_fields(offset: int, joined: Any = None, *, topic: str = "t", metadata: str = "") -> dict[str, Any]:
    partition = {"partition_index": 0, "committed_offset": offset, "committed_metadata": metadata}
    return {
        "group_id": "g",
        "generation_id_or_member_epoch": -1 if joined is None else joined.generation_id,
        "member_id": "" if joined is None else joined.member_id,
        "topics": [{"name": topic, "partitions": [partition]}],
    }


def _body(frame: bytes, api: ApiKey, version: int) -> bytes:
    from mansio.wire.headers import read_request_header

    return frame[4 + read_request_header(frame[4:]).body_position :]


def code(promise: Any) -> int:
    return promise.result().topics[0].partitions[0].error_code


def test_java_and_we_agree_on_the_partition_of_a_group() -> None:
    assert java_string_hash("") == 0
    assert java_string_hash("hello") == 99162322
    assert java_string_hash("polygenelubricants") == 0x80000000  # Integer.MIN_VALUE in Java
    assert java_string_hash("\U0001f600") == 31 * 0xD83D + 0xDE00  # two UTF-16 code units


def test_a_group_whose_hash_is_negative_in_java_has_kafkas_partition() -> None:
    broker = Broker()
    code(broker.commit(1))
    assert broker.groups.store.partition_for("polygenelubricants") == 0  # Utils.abs(Integer.MIN_VALUE) is 0


def test_members_carry_on_after_a_restart_without_a_rebalance() -> None:
    broker = Broker()
    joined = broker.stable()
    broker.commit(5, joined)
    broker.scheduler.turn()
    again = broker.restarted()
    assert again.heartbeat(joined) == 0
    assert code(again.commit(6, joined)) == 0
    assert again.committed() == {("t", 0): 6}
    resynced = again.sync(joined)
    assert resynced.result().assignment == ASSIGNMENT
    again.scheduler.pass_time(10_001)
    assert again.heartbeat(joined) == 25  # its session began anew with the start, and is over


def test_no_assignment_is_given_out_before_it_is_durable() -> None:
    broker = Broker()
    given = broker.join().result()
    joining = broker.join(given.member_id)
    broker.scheduler.pass_time(200)
    for partition in broker.partitions:
        partition.holds = True
    syncing = broker.sync(joining.result())
    broker.scheduler.pass_time(1_000)
    assert not syncing.done()
    for partition in broker.partitions:
        partition.sync()
    broker.scheduler.turn()
    assert syncing.result().error_code == 0


def test_a_commit_is_neither_answered_nor_shown_before_it_is_durable() -> None:
    broker = Broker()
    joined = broker.stable()
    for partition in broker.partitions:
        partition.holds = True
    commit = broker.commit(5, joined)
    reading = broker.begin(ApiKey.OFFSET_FETCH, groups=[{"group_id": "g", "topics": None}])
    broker.scheduler.pass_time(1_000)
    assert not commit.done()
    assert not reading.done()
    assert broker.restarted().committed() == {}
    for partition in broker.partitions:
        partition.sync()
    broker.scheduler.turn()
    assert code(commit) == 0
    assert reading.result().groups[0].topics[0].partitions[0].committed_offset == 5


def test_a_failing_disk_refuses_commits_and_sends_members_to_look_for_a_coordinator() -> None:
    broker = Broker()
    joined = broker.stable()
    for partition in broker.partitions:
        partition.fail(StorageError())
    assert code(broker.commit(5, joined)) == 16
    assert broker.committed() == {}


def test_a_commit_of_an_older_generation_never_moves_an_offset() -> None:
    broker = Broker()
    joined = broker.stable()
    code(broker.commit(5, joined))
    again = broker.join(joined.member_id)
    broker.scheduler.turn()
    assert again.result().generation_id == 2
    assert code(broker.commit(99, joined)) == 22
    assert code(broker.commit(99)) == 25  # from outside, into a group with members
    assert code(broker.commit(99, again.result())) == 27  # not before it has its assignment
    assert broker.committed() == {("t", 0): 5}


def test_a_consumer_without_a_group_commits_and_reads_back() -> None:
    broker = Broker()
    assert code(broker.commit(7)) == 0
    assert broker.restarted().committed() == {("t", 0): 7}
    assert code(broker.commit(8, topic="nowhere")) == 3
    assert code(broker.commit(8, metadata="x" * 5_000)) == 12
    assert (
        code(
            broker.begin(
                ApiKey.OFFSET_COMMIT,
                **{**commit_fields(8), "generation_id_or_member_epoch": 3, "group_id": "x"},
            )
        )
        == 22
    )
    assert broker.committed() == {("t", 0): 7}


def test_a_stall_of_the_broker_ends_nobodys_session_unheard() -> None:
    broker = Broker()
    joined = broker.stable()
    broker.scheduler.now_ms += 60_000  # we were suspended; timers and heartbeats are all late
    broker.scheduler.pass_time(10)
    assert broker.heartbeat(joined) == 0
    broker.scheduler.pass_time(9_000)
    assert broker.heartbeat(joined) == 0
    broker.scheduler.pass_time(11_001)
    assert broker.heartbeat(joined) == 25


def test_heartbeats_set_no_timers() -> None:
    broker = Broker()
    joined = broker.stable()
    before = len(broker.scheduler._timers)
    for _ in range(100):
        broker.heartbeat(joined)
    assert len(broker.scheduler._timers) == before


def test_a_deleted_group_is_gone_also_after_a_restart() -> None:
    broker = Broker()
    joined = broker.stable()
    code(broker.commit(5, joined))
    assert broker.call(ApiKey.DELETE_GROUPS, groups_names=["g", "none", ""]).results[0].error_code == 68
    left = broker.call(ApiKey.LEAVE_GROUP, group_id="g", members=[{"member_id": joined.member_id}])
    assert left.members[0].error_code == 0
    broker.scheduler.turn()
    results = broker.call(ApiKey.DELETE_GROUPS, groups_names=["g", "none", ""]).results
    assert [each.error_code for each in results] == [0, 69, 24]
    for each in (broker, broker.restarted()):
        assert each.groups.store.entries == {}
        assert each.call(ApiKey.LIST_GROUPS).groups == []
        assert each.call(ApiKey.DESCRIBE_GROUPS, groups=["g"]).groups[0].error_code == 69
        assert each.call(ApiKey.DESCRIBE_GROUPS, 5, groups=["g"]).groups[0].group_state == "Dead"


def test_a_group_that_could_not_be_deleted_is_still_there() -> None:
    broker = Broker()
    code(broker.commit(5))
    error = StorageError()
    for partition in broker.partitions:
        partition.refuses = error
    assert broker.call(ApiKey.DELETE_GROUPS, groups_names=["g"]).results[0].error_code == 16
    assert broker.committed() == {("t", 0): 5}


def test_offsets_of_topics_that_are_read_are_not_deleted() -> None:
    broker = Broker()
    joined = broker.stable()
    code(broker.commit(5, joined))
    wanted = [{"name": name, "partitions": [{"partition_index": 0}]} for name in ("t", "other")]
    answer = broker.call(ApiKey.OFFSET_DELETE, group_id="g", topics=wanted)
    assert [each.partitions[0].error_code for each in answer.topics] == [86, 3]
    broker.call(ApiKey.LEAVE_GROUP, group_id="g", members=[{"member_id": joined.member_id}])
    broker.scheduler.turn()
    answer = broker.call(ApiKey.OFFSET_DELETE, group_id="g", topics=wanted[:1])
    assert answer.topics[0].partitions[0].error_code == 0
    assert broker.committed() == broker.restarted().committed() == {}
    assert broker.call(ApiKey.OFFSET_DELETE, group_id="none", topics=wanted).error_code == 69


def test_offsets_of_a_deleted_topic_are_forgotten() -> None:
    broker = Broker()
    code(broker.commit(5))
    broker.scheduler.run(broker.groups.offsets.delete_offsets_of_topic("t"))
    assert broker.committed() == broker.restarted().committed() == {}


def test_offsets_expire_after_the_group_has_been_empty_for_the_retention_time() -> None:
    broker = Broker(offsets_retention_ms=1_000_000, offsets_retention_check_interval_ms=10_000)
    joined = broker.stable()
    code(broker.commit(5, joined))
    for _ in range(220):
        broker.scheduler.pass_time(9_000)
        assert broker.heartbeat(joined) == 0
    assert broker.committed() == {("t", 0): 5}
    broker.call(ApiKey.LEAVE_GROUP, group_id="g", members=[{"member_id": joined.member_id}])
    broker.scheduler.pass_time(990_000)
    assert broker.committed() == {("t", 0): 5}
    broker.scheduler.pass_time(30_000)
    assert broker.committed() == {}
    assert broker.groups.store.entries == {}
    assert broker.restarted().groups.store.entries == {}


def test_names_that_were_only_tried_leave_nothing_behind() -> None:
    broker = Broker()
    assert broker.join(session_timeout_ms=1).result().error_code == 26
    assert broker.join(group_id="").result().error_code == 24
    assert broker.join(protocols=[]).result().error_code == 23
    assert broker.groups.store.entries == {}
    assert broker.join("unknown").result().error_code == 25
    assert code(broker.commit(1, topic="nowhere")) == 3
    assert broker.groups.store.entries == {}
    broker.join()  # is given an id and never comes back
    broker.scheduler.pass_time(10_001)
    assert broker.groups.store.entries == {}
    assert broker.stored_bytes() == 0


def test_the_number_of_groups_is_bounded() -> None:
    broker = Broker(groups_max=1)
    code(broker.commit(5))
    assert broker.join(group_id="second").result().error_code == 15


def test_closing_answers_every_waiting_request() -> None:
    broker = Broker()
    joined = broker.stable()
    other = broker.join(version=3)
    assert not other.done()
    broker.scheduler.run(broker.groups.close())
    assert other.result().error_code == 16
    assert joined


def test_what_is_shown_of_a_group() -> None:
    broker = Broker()
    joined = broker.stable()
    code(broker.commit(60, joined))
    assert [tuple(row)[:5] for row in broker.groups.inspection.lag("g")] == [("t", 0, 60, 100, 40)]
    assert broker.groups.inspection.lag("g")[0].member_id == joined.member_id
    described = broker.call(ApiKey.DESCRIBE_GROUPS, groups=["g"]).groups[0]
    assert (described.group_state, described.protocol_type, described.protocol_data) == (
        "Stable",
        "consumer",
        "range",
    )
    assert described.members[0].client_host == "/10.0.0.1"
    assert described.members[0].member_assignment == ASSIGNMENT
    listed = broker.call(ApiKey.LIST_GROUPS, states_filter=["stable"], types_filter=["Classic"]).groups
    assert [(each.group_id, each.group_state, each.group_type) for each in listed] == [
        ("g", "Stable", "classic")
    ]
    assert broker.call(ApiKey.LIST_GROUPS, states_filter=["Empty"]).groups == []
    assert broker.call(ApiKey.LIST_GROUPS, types_filter=["consumer"]).groups == []


@pytest.mark.parametrize("version", range(7))
def test_find_coordinator_names_this_broker_for_groups(version: int) -> None:
    broker = Broker()
    keys = {"coordinator_keys": ["g"]} if version >= 4 else {"key": "g"}
    kind = {"key_type": 0} if version >= 1 else {}
    answer = broker.call(ApiKey.FIND_COORDINATOR, version, **keys, **kind)
    found = answer.coordinators[0] if version >= 4 else answer
    assert found.error_code == 0
    assert (found.node_id, found.host, found.port) == (1, "broker", 9092)


@pytest.mark.parametrize("version", range(10))
def test_every_version_of_join_ends_in_a_generation(version: int) -> None:
    broker = Broker()
    fields: dict[str, Any] = {} if version >= 1 else {"rebalance_timeout_ms": -1}
    joining = broker.join(version=version, **fields)
    if version >= 4:
        given = joining.result()
        assert given.error_code == 79
        joining = broker.join(given.member_id, version=version)
    broker.scheduler.pass_time(400)
    joined = joining.result()
    assert (joined.error_code, joined.generation_id, joined.leader) == (0, 1, joined.member_id)
    assert joined.members[0].metadata == SUBSCRIPTION


@pytest.mark.parametrize("version", range(1, 10))
def test_every_version_of_offset_fetch_returns_what_is_committed(version: int) -> None:
    broker = Broker()
    code(broker.commit(5))
    topics = [{"name": "t", "partition_indexes": [0, 1]}]
    if version >= 8:
        answer = broker.call(
            ApiKey.OFFSET_FETCH, version, groups=[{"group_id": "g", "topics": topics}]
        ).groups[0]
    else:
        answer = broker.call(ApiKey.OFFSET_FETCH, version, group_id="g", topics=topics)
    found = [(each.partition_index, each.committed_offset) for each in answer.topics[0].partitions]
    assert found == [(0, 5), (1, -1)]


@pytest.mark.parametrize("version", range(6))
def test_every_version_of_leave_group_names_who_left(version: int) -> None:
    broker = Broker()
    joined = broker.stable()
    if version < 3:
        assert broker.call(ApiKey.LEAVE_GROUP, version, group_id="g", member_id="other").error_code == 25
        assert (
            broker.call(ApiKey.LEAVE_GROUP, version, group_id="g", member_id=joined.member_id).error_code == 0
        )
        return
    members = [{"member_id": "other"}, {"member_id": joined.member_id}]
    answer = broker.call(ApiKey.LEAVE_GROUP, version, group_id="g", members=members)
    assert [each.error_code for each in answer.members] == [25, 0]


def test_what_members_say_of_themselves_is_bounded_for_all_groups_together() -> None:
    """It is kept for the length of a session, and the connection it came by may be gone the next moment."""
    broker = Broker(members_bytes_max=30_000, member_bytes_max=20_000)

    def join(group_id: str, size: int) -> int:
        protocols = [{"name": "range", "metadata": bytes(size)}]
        joining = broker.join(version=3, group_id=group_id, protocols=protocols, session_timeout_ms=20_000)
        broker.scheduler.pass_time(1000)
        return int(joining.result().error_code)

    assert join("large", 20_001) == INVALID_REQUEST
    assert [join(f"g{number}", 9_000) for number in range(4)] == [0, 0, 0, COORDINATOR_NOT_AVAILABLE]
    assert join("small", 100) == 0, "who says little of itself still has room"
    broker.scheduler.pass_time(30_000)
    assert [join(f"later {number}", 9_000) for number in range(4)] == [0, 0, 0, COORDINATOR_NOT_AVAILABLE]
