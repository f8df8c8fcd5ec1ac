"""What a broker of a cluster reports about it: brokers, leaders, the controller, elections; bytes in and bytes out."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import pytest

from mansio.api.kafka.handlers.share.share_fetch import LeaderHints
from mansio.broker.coordinator.share.lease_forwarder import LeaseForwarder
from mansio.broker.routing.routes import ClusterCoordinatorLookup
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.cluster import ClusterDescriptionService, ClusterServices
from mansio.broker.services.elections import ElectionService
from mansio.broker.services.reassignments import ReassignmentService
from mansio.broker.services.topic_admin import TopicAdminService
from mansio.config.settings import Settings
from mansio.errors import (
    ConcurrentChange,
    LeaderNotAvailable,
    MansioError,
    NotLeaderOrFollower,
    UnknownTopicOrPartition,
)
from mansio.metadata import reassignment
from mansio.metadata.cluster_view import ClusterView
from mansio.metadata.controller_plan import preferred_election, unclean_election
from mansio.metadata.feature_level import SUPPORTED, check_update
from mansio.metadata.image import MetadataImage
from mansio.metadata.metadata_response import TopicEncoder
from mansio.metadata.metadata_store import Keys
from mansio.metadata.model import (
    BROKER_ACTIVE,
    BROKER_DRAINING,
    BROKER_FENCED,
    TOPIC_LIVE,
    ControllerState,
    PartitionState,
    Registration,
    Topic,
)
from mansio.wire.api_versions import ApiKey
from support.listeners import broker_state, served_listener
from support.quotas import NoQuotas
from unit.broker.groups_fixtures import VirtualScheduler
from unit.broker.test_topics_handlers import LISTENER, Peer, each_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.services.quotas import QuotaService
    from mansio.broker.topics.topics import TopicService
    from mansio.metadata.feature_level import FeatureUpdate
    from mansio.metadata.reassignment import Reassignment
    from mansio.wire.codec.messages import Struct

OWN = 1
OK, UNKNOWN_TOPIC, NO_LEADER_NOW, TIMED_OUT, BAD_REQUEST, BROKER_NOT_AVAILABLE = 0, 3, 5, 7, 42, 8
BAD_FACTOR, BAD_REPLICAS, PREFERRED_AWAY, NONE_ELIGIBLE, NOT_NEEDED, NOT_MOVING = 38, 39, 80, 83, 84, 85
ALL_LEFT_OUT = None


def partition(leader: int, *, isr: tuple[int, ...] = (1, 2, 3), epoch: int | None = None, **more: Any) -> Any:
    """Of brokers 1, 2, 3, in that order; a broker's session is ten times its number, unless it came again."""
    session = 10 * leader if epoch is None else epoch
    return PartitionState((1, 2, 3), leader, 7, isr, leader_broker_epoch=max(session, 0), **more)


class ClusterNode:
    """Node 1 of a cluster of three, as its view shows it."""

    def __init__(
        self, partitions: list[PartitionState], *, alive: tuple[int, ...] = (1, 2, 3), name: str = "t"
    ) -> None:
        self.state = MetadataImage("c" * 22, Keys("c" * 22))
        for node_id in (1, 2, 3):
            self.state.registrations[node_id] = Registration(
                BROKER_ACTIVE if node_id in alive else BROKER_FENCED, 1
            )
        for node_id in alive:
            self.state.brokers[node_id] = broker_state(
                node_id, f"host{node_id}", 9000 + node_id, f"r{node_id}", 10 * node_id
            )
        self.put(Topic(name, UUID(int=5), tuple(partitions), 3, {}, False, TOPIC_LIVE, 1))
        self.clock = self.scheduler = VirtualScheduler()
        self.controller = PlanController(self)
        self.settings = Settings(node_id=OWN, broker_rack="own-rack")
        self.holds = OWN in alive
        self.cluster = cast(
            "ClusterServices",
            SimpleNamespace(controller=self.controller, is_session_valid=lambda: self.holds),
        )
        self.topics = cast(
            "TopicService", SimpleNamespace(state=self.state, encoder=TopicEncoder(), find=self.find)
        )
        authorization = Authorization(None)
        self.cluster_description = ClusterDescriptionService(
            topics=self.topics,
            settings=self.settings,
            cluster=self.cluster,
            authorization=authorization,
        )
        self.topic_admin = TopicAdminService(
            self.topics,
            quotas=cast("QuotaService", NoQuotas()),
            scheduler=self.scheduler,
            authorization=authorization,
        )
        self.reassignments = ReassignmentService(
            topics=self.topics, cluster=self.cluster, scheduler=self.scheduler, authorization=authorization
        )
        self.elections = ElectionService(
            topics=self.topics,
            cluster=self.cluster,
            clock=self.clock,
            scheduler=self.scheduler,
            authorization=authorization,
        )

    def put(self, topic: Topic) -> None:
        self.state.topics[topic.name] = self.state.topics_by_id[topic.topic_id] = topic

    def find(self, name: str) -> Topic:
        if name not in self.state.topics:
            raise UnknownTopicOrPartition
        return self.state.topics[name]

    def ask(self, api_key: ApiKey, version: int, **fields: Any) -> Struct:
        peer = Peer.__new__(Peer)
        peer.service = self
        return asyncio.run(peer.ask(api_key, version, fields))

    def elect(self, election_type: int, indexes: list[int] | None, **more: Any) -> list[tuple[int, int]]:
        wanted = None if indexes is None else [{"topic": "t", "partitions": indexes}]
        fields = {"election_type": election_type, "topic_partitions": wanted, "timeout_ms": 1000, **more}
        answer = self.ask(ApiKey.ELECT_LEADERS, 2, **fields)
        return [
            (each.partition_id, each.error_code)
            for topic in answer.replica_election_results
            for each in topic.partition_result
        ]


class PlanController:
    """Elects as the controller does, by the same plan, and has it at once."""

    def __init__(self, world: ClusterNode) -> None:
        self._world = world
        self.asked: list[int] = []
        self.fail: Exception | None = None
        self.takes_ms = 0.0

    async def update_features(self, updates: Sequence[FeatureUpdate], *, validate_only: bool) -> None:
        state = self._world.state
        brokers = {node_id: each.levels for node_id, each in state.registrations.items()}
        for feature, level, update_type in updates:
            changes = check_update(feature, level, update_type, current=state.feature_level, brokers=brokers)
            if changes and not validate_only:
                state.feature_level, state.feature_revision = level, 17

    async def reassign(
        self, wanted: Sequence[Reassignment], *, may_change_factor: bool
    ) -> list[MansioError | None]:
        state = self._world.state
        view = ClusterView(state.brokers, state.registrations, state.topics, {})
        results: list[MansioError | None] = []
        for each in wanted:
            topic = state.topics[each.topic]
            try:
                if each.replicas is None:
                    reassignment.cancel(view, topic, each.partition)
                else:
                    reassignment.begin(
                        view, topic, each.partition, each.replicas, may_change_factor=may_change_factor
                    )
            except MansioError as error:
                results.append(error)
            else:
                results.append(None)
        return results

    async def elect_preferred(self, name: str, index: int) -> PartitionState:
        return self._elect(name, index, None)

    async def elect_unclean(self, name: str, index: int, node_id: int) -> PartitionState:
        return self._elect(name, index, node_id)

    def _elect(self, name: str, index: int, node_id: int | None) -> PartitionState:
        self.asked.append(index)
        self._world.clock.now_ms += self.takes_ms
        if self.fail is not None:
            raise self.fail
        state = self._world.state
        topic = state.topics[name]
        view = ClusterView(state.brokers, state.registrations, state.topics, {})
        change = (
            preferred_election(view, topic, index)
            if node_id is None
            else unclean_election(view, topic, index, node_id)
        )
        if change is None:
            return topic.partitions[index]
        partitions = list(topic.partitions)
        partitions[index] = change.after
        self._world.put(
            Topic(name, topic.topic_id, tuple(partitions), 3, {}, False, TOPIC_LIVE, topic.mod_revision + 1)
        )
        return change.after


# Brokers, leaders, controller


@each_version(ApiKey.METADATA)
def test_metadata_names_the_brokers_that_have_a_session_and_no_others_as_leaders(version: int) -> None:
    world = ClusterNode([partition(2), partition(3), partition(-1)], alive=(1, 2))
    world.state.controller = ControllerState(2, 99)
    answer = world.ask(ApiKey.METADATA, version, topics=[] if version == 0 else None)
    assert [(one.node_id, one.host, one.port) for one in answer.brokers] == [
        (1, *LISTENER),
        (2, "host2", 9002),
    ]
    found = [(one.error_code, one.leader_id) for one in answer.topics[0].partitions]
    assert found == [(OK, 2), (NO_LEADER_NOW, -1), (NO_LEADER_NOW, -1)]
    assert {tuple(one.replica_nodes) for one in answer.topics[0].partitions} == {(1, 2, 3)}
    if version >= 1:
        assert [one.rack for one in answer.brokers] == ["own-rack", "r2"]
        assert answer.controller_id == OWN
    if version >= 5:
        assert {tuple(one.offline_replicas) for one in answer.topics[0].partitions} == {(3,)}


def test_when_a_broker_comes_back_metadata_show_it_at_once() -> None:
    world = ClusterNode([partition(3)], alive=(1, 2))
    assert world.ask(ApiKey.METADATA, 12, topics=None).topics[0].partitions[0].leader_id == -1
    world.state.brokers[3] = broker_state(3, "host3", 9003, None, 30)
    shown = world.ask(ApiKey.METADATA, 12, topics=None).topics[0].partitions[0]
    assert (shown.leader_id, list(shown.offline_replicas)) == (3, [])


@pytest.mark.parametrize(
    ("controller", "reported"), [(None, -1), (ControllerState(3, 9), -1), (ControllerState(2, 9), 2)]
)
def test_no_controller_is_named_that_is_not_there(controller: ControllerState | None, reported: int) -> None:
    world = ClusterNode([partition(1)], alive=(1, 2))
    world.state.controller = controller
    assert world.ask(ApiKey.DESCRIBE_CLUSTER, 2, endpoint_type=1).controller_id == reported


def named_controller(world: ClusterNode) -> int:
    return int(world.ask(ApiKey.METADATA, 12, topics=[]).controller_id)


@pytest.mark.parametrize("controller", [None, 1, 2, 3])
def test_clients_are_sent_to_the_broker_that_answers_which_is_surely_there(controller: int | None) -> None:
    world = ClusterNode([partition(1)])
    world.state.controller = None if controller is None else ControllerState(controller, 9)
    assert named_controller(world) == OWN


@pytest.mark.parametrize("unfit", ["its session may have ended", "it is stopping", "it is fenced"])
def test_a_broker_that_can_change_nothing_sends_clients_to_one_that_can(unfit: str) -> None:
    world = ClusterNode([partition(1)])
    world.holds = unfit != "its session may have ended"
    state = {"it is stopping": BROKER_DRAINING, "it is fenced": BROKER_FENCED}.get(unfit, BROKER_ACTIVE)
    world.state.registrations[OWN] = Registration(state, 5)
    assert named_controller(world) == 2
    world.state.controller = ControllerState(3, 9)
    assert named_controller(world) == 3
    world.state.registrations[3] = Registration(BROKER_DRAINING, 5)
    assert named_controller(world) == 2


def test_where_no_broker_can_change_anything_the_one_that_answers_states_why() -> None:
    world = ClusterNode([partition(1)], alive=(1,))
    world.holds = False
    assert named_controller(world) == OWN


def test_a_broker_whose_session_ended_points_to_the_others_and_alone_to_itself() -> None:
    world = ClusterNode([partition(2)], alive=(2, 3))
    assert [one.node_id for one in world.ask(ApiKey.METADATA, 12, topics=[]).brokers] == [2, 3]
    world.state.brokers.clear()
    answer = world.ask(ApiKey.METADATA, 12, topics=None)
    assert [(one.node_id, one.host, one.port) for one in answer.brokers] == [(1, *LISTENER)]
    assert answer.controller_id == OWN


@each_version(ApiKey.DESCRIBE_CLUSTER)
def test_describe_cluster_shows_fenced_brokers_to_who_asks(version: int) -> None:
    world = ClusterNode([partition(1)], alive=(1, 3))
    fields = {"endpoint_type": 1, "include_fenced_brokers": True} if version >= 2 else {}
    answer = world.ask(ApiKey.DESCRIBE_CLUSTER, version, **fields)
    shown = [(one.broker_id, one.host, one.port, one.rack) for one in answer.brokers]
    there = [(1, *LISTENER, "own-rack"), (3, "host3", 9003, "r3")]
    assert shown == ([*there, (2, "", -1, None)] if version >= 2 else there)
    if version >= 2:
        assert [one.is_fenced for one in answer.brokers] == [False, False, True]
        without = world.ask(ApiKey.DESCRIBE_CLUSTER, version, endpoint_type=1)
        assert [one.broker_id for one in without.brokers] == [1, 3]


@each_version(ApiKey.DESCRIBE_QUORUM)
def test_the_active_controller_stands_for_the_members_of_etcd(version: int) -> None:
    world = ClusterNode([partition(1)], alive=(1, 2))
    topics = [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]

    def described() -> Any:
        return world.ask(ApiKey.DESCRIBE_QUORUM, version, topics=topics).topics[0].partitions[0]

    for absent in (None, ControllerState(3, 9)):
        world.state.controller = absent
        assert (described().error_code, described().leader_id) == (NO_LEADER_NOW, -1)
    for controller, observers in ((1, []), (2, [1])):
        world.state.controller = ControllerState(controller, (1 << 31) + 9)
        found = described()
        assert (found.error_code, found.leader_id, found.leader_epoch) == (OK, controller, 9)
        assert [one.replica_id for one in found.current_voters] == [controller]
        assert [one.replica_id for one in found.observers] == observers


def test_a_broker_that_is_stopping_is_there_until_its_session_ends() -> None:
    world = ClusterNode([partition(2)])
    world.state.registrations[2] = Registration(BROKER_DRAINING, 5)
    assert world.ask(ApiKey.METADATA, 12, topics=None).topics[0].partitions[0].leader_id == 2


def test_describe_topic_partitions_agrees_with_metadata() -> None:
    world = ClusterNode([partition(2), partition(3, isr=(3,))], alive=(1, 2))
    answer = world.ask(
        ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[], response_partition_limit=10, cursor=None
    )
    shown = [
        (one.error_code, one.leader_id, list(one.isr_nodes), list(one.offline_replicas))
        for one in answer.topics[0].partitions
    ]
    assert shown == [(OK, 2, [1, 2, 3], [3]), (NO_LEADER_NOW, -1, [3], [3])]


# Elections


def test_a_preferred_election_moves_what_the_first_replica_can_lead() -> None:
    world = ClusterNode([partition(2), partition(1), partition(3, isr=(2, 3))])
    assert world.elect(0, [0, 1, 2, 3]) == [
        (0, OK),
        (1, NOT_NEEDED),
        (2, PREFERRED_AWAY),
        (3, UNKNOWN_TOPIC),
    ]
    assert world.state.topics["t"].partitions[0].is_led_by(1, 10)
    assert world.controller.asked == [0, 2]  # where nothing is to be done nobody is asked


def test_asked_for_all_partitions_those_that_need_no_election_are_left_out() -> None:
    world = ClusterNode([partition(2), partition(1), partition(3, isr=(2, 3))])
    assert world.elect(0, ALL_LEFT_OUT) == [(0, OK), (2, PREFERRED_AWAY)]
    assert world.elect(1, ALL_LEFT_OUT) == []


def test_an_unclean_election_is_held_only_where_no_replica_in_sync_can_lead() -> None:
    partitions = [partition(-1, isr=(3,)), partition(2), partition(-1, isr=(2,))]
    world = ClusterNode(partitions, alive=(1, 2))
    assert world.elect(1, [0, 1, 2]) == [(0, OK), (1, NOT_NEEDED), (2, NOT_NEEDED)]
    elected = world.state.topics["t"].partitions[0]
    assert (elected.leader, elected.isr, elected.leader_epoch) == (1, (1,), 8)


def test_an_unclean_election_without_a_replica_that_is_there_elects_none() -> None:
    world = ClusterNode([partition(-1, isr=(3,))], alive=())
    assert world.elect(1, [0]) == [(0, NONE_ELIGIBLE)]
    assert world.controller.asked == []


def test_a_leader_of_an_earlier_session_is_not_one() -> None:
    world = ClusterNode([partition(1, epoch=3)])  # broker 1 was started anew since
    assert world.elect(0, [0]) == [(0, OK)]


def test_elections_end_with_the_time_of_the_request() -> None:
    world = ClusterNode([partition(2), partition(2), partition(2), partition(1)])
    world.controller.takes_ms = 600
    assert world.elect(0, [0, 1, 2, 3]) == [(0, OK), (1, OK), (2, TIMED_OUT), (3, NOT_NEEDED)]


def test_what_others_change_meanwhile_and_what_makes_no_sense_has_its_own_error() -> None:
    world = ClusterNode([partition(2)])
    assert world.elect(2, [0]) == [(0, BAD_REQUEST)]
    world.controller.fail = ConcurrentChange("others")
    assert world.elect(0, [0]) == [(0, BROKER_NOT_AVAILABLE)]


@pytest.mark.parametrize("version", [0, 1, 2])
def test_every_version_of_elect_leaders_can_ask_for_the_preferred(version: int) -> None:
    world = ClusterNode([partition(2)])
    fields = {"topic_partitions": [{"topic": "t", "partitions": [0]}], "timeout_ms": 1000}
    answer = world.ask(ApiKey.ELECT_LEADERS, version, **fields, **({"election_type": 0} if version else {}))
    result = answer.replica_election_results[0].partition_result[0]
    assert (result.partition_id, result.error_code) == (0, OK)


# Reassignments


def test_what_is_being_moved_is_listed_and_nothing_else() -> None:
    moving = partition(1, adding=(3,), removing=(2,))
    world = ClusterNode([partition(1), moving])
    for topics in (
        None,
        [{"name": "t", "partition_indexes": [0, 1, 9]}, {"name": "u", "partition_indexes": [0]}],
    ):
        answer = world.ask(ApiKey.LIST_PARTITION_REASSIGNMENTS, 0, timeout_ms=1000, topics=topics)
        assert [each.name for each in answer.topics] == ["t"]
        found = answer.topics[0].partitions
        assert [
            (one.partition_index, one.replicas, one.adding_replicas, one.removing_replicas) for one in found
        ] == [(1, [1, 2, 3], [3], [2])]
    asked = [{"name": "t", "partition_indexes": [0]}]
    answer = world.ask(ApiKey.LIST_PARTITION_REASSIGNMENTS, 0, timeout_ms=1000, topics=asked)
    assert answer.topics == []


@pytest.mark.parametrize("version", [0, 1])
def test_each_partition_of_a_reassignment_succeeds_or_fails_on_its_own(version: int) -> None:
    world = ClusterNode([partition(1)] * 6)
    plans = [[1, 2, 3], [2, 1, 3], [1, 9], None, [], [1, 2]]
    partitions = [{"partition_index": index, "replicas": plan} for index, plan in enumerate(plans)]
    more = {"allow_replication_factor_change": False} if version else {}
    wanted = [{"name": "t", "partitions": partitions}]
    answer = world.ask(ApiKey.ALTER_PARTITION_REASSIGNMENTS, version, timeout_ms=1000, topics=wanted, **more)
    found = answer.responses[0].partitions
    factor = BAD_FACTOR if version else OK
    assert [each.error_code for each in found] == [OK, OK, BAD_REPLICAS, NOT_MOVING, BAD_REPLICAS, factor]
    assert [each.partition_index for each in found] == [*range(6)]
    assert "there is no broker 9" in found[2].error_message


# Where groups are coordinated, by the same view


def test_a_group_is_coordinated_by_the_leader_in_the_session_it_was_chosen_in() -> None:
    partitions = [partition(2), partition(3), partition(1, epoch=3), partition(-1)]
    world = ClusterNode(partitions, alive=(1, 2), name="__consumer_offsets")
    places = ClusterCoordinatorLookup(world.state)
    assert places.partition_count() == 4
    leaders = [places.leader(index) for index in range(5)]
    assert [None if one is None else one.node_id for one in leaders] == [2, None, None, None, None]
    assert [places.leader_id(index) for index in range(5)] == [2, 3, 1, -1, -1]
    assert places.has_partition("__consumer_offsets", 3)
    assert not places.has_partition("__consumer_offsets", 4)
    assert not places.has_partition("none", 0)
    world.state.topics.clear()
    assert places.partition_count() == 0
    assert places.leader(0) is None
    assert not places.has_topic("__consumer_offsets")


def test_requests_about_leases_and_hints_name_the_leader_in_the_session_it_was_chosen_in() -> None:
    world = ClusterNode([partition(2), partition(3), partition(1, epoch=3), partition(-1)], alive=(1, 2))
    unused: Any = None
    forwarder = LeaseForwarder(
        node_id=1,
        broker_epoch=lambda: 1,
        state=world.state,
        peers=unused,
        data_peers=unused,
        scheduler=unused,
    )
    services: Any = SimpleNamespace(topics=SimpleNamespace(state=world.state))
    topic_id = world.state.topics["t"].topic_id.bytes
    assert forwarder.partitions_by_leader(["t"]) == {2: [("t", 0)]}
    assert forwarder.other_leader(topic_id, 0) == 2
    hints = LeaderHints(services, served_listener())
    assert hints.leader_of(topic_id, 0, NotLeaderOrFollower("")) == (
        2,
        world.state.topics["t"].partitions[0].leader_epoch,
    )
    for index in (1, 2, 3):
        with pytest.raises(LeaderNotAvailable):
            forwarder.other_leader(topic_id, index)
        assert hints.leader_of(topic_id, index, NotLeaderOrFollower("")) == (-1, -1)
    assert [each.node_id for each in hints.endpoints] == [2]


# Listeners


class ListenerNode(ClusterNode):
    """Node 1 of a cluster in which broker 3 has no listener OUTSIDE, asked through that listener."""

    def __init__(self, *, is_advertised: bool = True) -> None:
        super().__init__([partition(1), partition(2), partition(3), partition(-1)])
        for node_id, listeners in {1: ("PLAINTEXT", "OUTSIDE"), 2: ("OUTSIDE",), 3: ("PLAINTEXT",)}.items():
            outside = broker_state(node_id, f"out{node_id}", 9000 + node_id, None, 10 * node_id, *listeners)
            self.state.brokers[node_id] = outside._replace(host="inside", port=1)
        asked = served_listener(*LISTENER, name="OUTSIDE")
        self.listener = asked if is_advertised else asked._replace(endpoint=None)
        if not is_advertised:
            self.state.brokers[OWN] = broker_state(OWN, "out1", 9001, None, 10)

    def ask(self, api_key: ApiKey, version: int, **fields: Any) -> Struct:
        peer = Peer.__new__(Peer)
        peer.service, peer.listener = self, self.listener
        return asyncio.run(peer.ask(api_key, version, fields))


@each_version(ApiKey.METADATA)
def test_metadata_leave_out_brokers_without_the_listener_and_say_so_of_their_partitions(version: int) -> None:
    answer = ListenerNode().ask(ApiKey.METADATA, version, topics=[] if version == 0 else None)
    assert [(one.node_id, one.host, one.port) for one in answer.brokers] == [
        (1, *LISTENER),
        (2, "out2", 9002),
    ]
    no_listener = 72 if version >= 6 else NO_LEADER_NOW
    found = [(one.error_code, one.leader_id) for one in answer.topics[0].partitions]
    assert found == [(OK, 1), (OK, 2), (no_listener, -1), (NO_LEADER_NOW, -1)]
    if version >= 5:
        assert {tuple(one.offline_replicas) for one in answer.topics[0].partitions} == {(3,)}


def test_clients_of_a_listener_that_is_not_advertised_are_not_sent_to_this_broker() -> None:
    answer = ListenerNode(is_advertised=False).ask(ApiKey.METADATA, 12, topics=None)
    assert [one.node_id for one in answer.brokers] == [2]
    assert [one.error_code for one in answer.topics[0].partitions] == [72, OK, 72, NO_LEADER_NOW]


def test_the_cluster_and_pages_of_topics_are_described_for_the_listener() -> None:
    world = ListenerNode()
    world.state.controller = ControllerState(3, 9)
    described = world.ask(ApiKey.DESCRIBE_CLUSTER, 2, endpoint_type=1, include_fenced_brokers=True)
    assert [(one.broker_id, one.host) for one in described.brokers] == [(1, LISTENER[0]), (2, "out2")]
    assert described.controller_id == -1, "clients cannot reach it"
    page = world.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[], response_partition_limit=10, cursor=None)
    found = [(one.error_code, one.leader_id) for one in page.topics[0].partitions]
    assert found == [(OK, 1), (OK, 2), (72, -1), (NO_LEADER_NOW, -1)]


def test_hints_name_leaders_that_the_client_reaches_through_its_listener() -> None:
    world = ListenerNode()
    services: Any = SimpleNamespace(topics=SimpleNamespace(state=world.state))
    topic_id = world.state.topics["t"].topic_id.bytes
    hints = LeaderHints(services, world.listener)
    found = [hints.leader_of(topic_id, index, NotLeaderOrFollower(""))[0] for index in (1, 2)]
    assert found == [2, -1]
    assert [(each.node_id, each.host, each.port) for each in hints.endpoints] == [(2, "out2", 9002)]


# The feature level

BAD_LEVEL = 95


def announced(world: ClusterNode) -> tuple[int, int, tuple[int, int]]:
    """Level of the cluster with its epoch, and the levels that this broker supports."""
    answer = world.ask(ApiKey.API_VERSIONS, 3)
    levels = {each.name: each.max_version_level for each in answer.finalized_features}
    supported = {each.name: (each.min_version, each.max_version) for each in answer.supported_features}
    return levels["mansio.version"], answer.finalized_features_epoch, supported["mansio.version"]


@pytest.mark.parametrize("version", [0, 1, 2])
def test_feature_level_is_raised_when_all_brokers_support_it_and_never_lowered(version: int) -> None:
    world = ClusterNode([partition(1)])
    world.state.feature_level = 1

    def update(level: int, **more: Any) -> tuple[int, str | None, list[tuple[str, int]]]:
        updates = [{"feature": "mansio.version", "max_version_level": level}]
        answer = world.ask(ApiKey.UPDATE_FEATURES, version, feature_updates=updates, timeout_ms=1000, **more)
        results = [(each.feature, each.error_code) for each in getattr(answer, "results", ())]
        return answer.error_code, answer.error_message, results

    code, message, results = update(2)
    assert (code, results) == (BAD_LEVEL, [])
    assert message is not None
    assert "broker 1 supports 1, broker 2 supports 1, broker 3 supports 1" in message
    assert announced(world) == (1, 0, (1, 2))
    for node_id, each in world.state.registrations.items():
        world.state.registrations[node_id] = each._replace(levels=SUPPORTED)
    done = [("mansio.version", OK)] if version < 2 else []
    if version:
        assert update(2, validate_only=True) == (OK, None, done)
        assert announced(world) == (1, 0, (1, 2))
    assert update(2) == (OK, None, done)
    assert announced(world) == (2, 17, (1, 2))
    assert update(1)[0] == BAD_LEVEL
    assert update(3)[0] == BAD_LEVEL
    assert announced(world) == (2, 17, (1, 2))
