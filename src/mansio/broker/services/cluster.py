"""Description of the cluster for clients: brokers, controller, topics and metadata quorum.

Not obvious:
* A client gets the addresses that brokers advertise for the listener through which it asks: that of this broker from
  the listener itself, those of others from the metadata. A broker without that listener is not returned.
* In a cluster, only brokers with a session are returned as brokers and as leaders. A registered broker without a
  session is fenced; its address is unknown.
* Every client may learn the brokers. Topics need DESCRIBE, and what is said of a topic without it does not depend on
  whether it exists.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.replication.log_repairer import RepairCounts
from mansio.errors import InvalidRequest, LeaderNotAvailable, MansioError
from mansio.metadata.feature_level import check_update
from mansio.metadata.topic_plan import check_topic_name
from mansio.state.authorization.acls import CLUSTER_NAME, Operation, ResourceType
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Sequence

    from mansio.broker.replication.isr_manager import IsrManager
    from mansio.broker.replication.replica_fetcher import ReplicaFetcherManager
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.topics.topics import TopicService
    from mansio.config.listeners import SecurityProtocol
    from mansio.config.settings import Settings
    from mansio.host.item_turns import ItemTurns
    from mansio.metadata.controller.controller import Controller
    from mansio.metadata.feature_level import FeatureUpdate
    from mansio.metadata.hand_over.hand_over import HandOver
    from mansio.metadata.metadata_store import StoreCounts
    from mansio.metadata.model import BrokerEndpoint, Topic
    from mansio.metadata.session import Session

    Cursor = tuple[str, int]
    """(topic, partition) with which a page of partitions begins."""

NO_CONTROLLER: Final = -1
"""Controller id while the cluster has no active controller."""

EPOCH_MASK: Final = (1 << 31) - 1
"""Controller epochs are etcd revisions; DescribeQuorum has only 31 bits for them."""

PARTITIONS_PER_PAGE_MAX: Final = 2000
"""Maximum number of partitions on one page: the default of Kafka's max.request.partition.size.limit."""


@dataclass(frozen=True, slots=True)
class ClusterServices:
    """Components and state that a broker of a cluster has and a single node has not."""

    controller: Controller
    isr_manager: IsrManager
    fetcher_manager: ReplicaFetcherManager
    session: Callable[[], Session | None]
    """Returns this broker's session; None while it has none."""
    is_session_valid: Callable[[], bool]
    """Returns whether this broker's session has certainly not expired."""
    sessions_lost: Callable[[], int]
    """Returns the number of sessions that ended although this broker kept running."""
    hand_over: HandOver
    """Early hand-over; not started if this broker takes no part in it."""
    repair_counts: Callable[[], RepairCounts] = RepairCounts
    """Returns counts of damaged batches that were repaired from other replicas."""
    store_counts: Callable[[], StoreCounts] | None = None
    """Returns counts of calls to the metadata store by outcome; None if the store does not count them."""


class ServedListener(NamedTuple):
    """A listener of this broker. `endpoint`: what it advertises to the clients of the listener, None if nothing."""

    name: str
    security_protocol: SecurityProtocol
    endpoint: BrokerEndpoint | None


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """The cluster for clients of one listener. `brokers`: the brokers that have a session and the listener, sorted by
    id; `live_broker_ids`: their ids. `without_listener`: ids of brokers that have a session and not the listener.
    `fenced`: ids of registered brokers without a session. `controller_id`: id of the active controller,
    `NO_CONTROLLER` if it is not in `brokers`."""

    cluster_id: str
    controller_id: int
    brokers: Sequence[BrokerEndpoint]
    live_broker_ids: frozenset[int]
    fenced: Sequence[int]
    without_listener: frozenset[int]


@dataclass(frozen=True, slots=True)
class DescribedTopic:
    """One topic on a page: `partitions` are the indexes of its partitions on the page. `error`: why the topic cannot be
    described, None if it can. `authorized_operations`: what the caller may do with it (KIP-430), None if the caller may
    not describe it."""

    name: str
    topic: Topic | None = None
    partitions: range = range(0)
    error: MansioError | None = None
    authorized_operations: int | None = None


@dataclass(frozen=True, slots=True)
class TopicsPage:
    """One page of topics with their partitions. `next_cursor`: where the next page begins, None on the last page."""

    topics: Sequence[DescribedTopic]
    next_cursor: Cursor | None = None


@dataclass(frozen=True, slots=True)
class QuorumDescription:
    """The metadata store in the form of a KRaft quorum. `leader_id` and `epoch`: id and epoch of the active controller;
    `revision`: metadata revision of this broker; `observer`: id of this broker, None if it is the controller."""

    leader_id: int
    epoch: int
    revision: int
    observer: int | None


class FinalizedLevel(NamedTuple):
    """Feature level of a cluster. `epoch`: increases with each change, 0 if it was never stored."""

    level: int
    epoch: int


class ClusterDescriptionService:
    """Describes the cluster as this broker knows it. All methods run on the broker's event loop."""

    __slots__ = ("_authorization", "_cluster", "_settings", "_topics")

    def __init__(
        self,
        *,
        topics: TopicService,
        settings: Settings,
        cluster: ClusterServices | None,
        authorization: Authorization,
    ) -> None:
        """`cluster` is None on a single node."""
        self._topics = topics
        self._settings = settings
        self._cluster = cluster
        self._authorization = authorization

    def authorized_operations(self, *, caller: Caller) -> int:
        """Return the set of operations that the caller may do on the cluster (KIP-430); it is empty without DESCRIBE,
        as in Kafka."""
        authorization = self._authorization
        if not authorization.allows(caller, Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME):
            return 0
        return authorization.authorized_operations(caller, ResourceType.CLUSTER, CLUSTER_NAME)

    def describe(self, listener: ServedListener) -> ClusterDescription:
        """Describe the cluster to a client of `listener`. If this broker advertises the listener, the result contains
        at least one broker."""
        own, state = self._settings.node_id, self._topics.state
        name = listener.name
        known = {
            node_id: endpoint
            for node_id, broker in state.brokers.items()
            if (endpoint := broker.endpoints.get(name)) is not None
        }
        if listener.endpoint is not None and (own in state.brokers or not state.brokers):
            known[own] = listener.endpoint
        brokers = [known[node_id] for node_id in sorted(known)]
        without_listener: frozenset[int] = frozenset()
        if len(known) < len(state.brokers):
            without_listener = frozenset(state.brokers.keys() - known.keys())
        fenced = [
            node_id
            for node_id in sorted(state.registrations)
            if node_id not in known and node_id not in without_listener
        ]
        return ClusterDescription(
            state.cluster_id,
            self._controller_id(known),
            brokers,
            frozenset(known),
            fenced,
            without_listener,
        )

    def _controller_id(self, known: Container[int]) -> int:
        """Return the id of the active controller if it is in `known`, else `NO_CONTROLLER`. A single node is its own
        controller."""
        state = self._topics.state
        if not state.registrations:
            return self._settings.node_id
        controller = state.controller
        return NO_CONTROLLER if controller is None or controller.node_id not in known else controller.node_id

    def describe_quorum(self, *, caller: Caller) -> QuorumDescription:
        """Describe the metadata store in the form of a KRaft quorum (KIP-595). The members of etcd have no broker ids;
        therefore the active controller is returned as the only voter.

        Raises `ClusterAuthorizationFailed` without DESCRIBE for the cluster, and `LeaderNotAvailable` while there is no
        active controller.
        """
        self._authorization.check_cluster(caller, Operation.DESCRIBE)
        own, state = self._settings.node_id, self._topics.state
        if not state.registrations:
            return QuorumDescription(own, 0, state.revision, None)
        controller = state.controller
        if controller is None or controller.node_id not in state.brokers:
            raise LeaderNotAvailable("there is no active controller now")
        observer = None if controller.node_id == own else own
        return QuorumDescription(controller.node_id, controller.epoch & EPOCH_MASK, state.revision, observer)

    def feature_level(self) -> FinalizedLevel:
        """Return the feature level of the cluster; a single node has that of its version."""
        state = self._topics.state
        return FinalizedLevel(state.feature_level, state.feature_revision)

    async def update_features(
        self, updates: Sequence[FeatureUpdate], *, validate_only: bool, caller: Caller
    ) -> None:
        """Raise the feature level of the cluster (KIP-584); nothing else can be changed. All updates are executed, or
        none. Raises `ClusterAuthorizationFailed` without ALTER for the cluster, `InvalidUpdateVersion`,
        `FeatureUpdateFailed` and `Unavailable`."""
        self._authorization.check_cluster(caller, Operation.ALTER)
        if self._cluster is not None:
            await self._cluster.controller.update_features(updates, validate_only=validate_only)
            return
        for feature, level, update_type in updates:
            check_update(feature, level, update_type, current=self._topics.state.feature_level, brokers={})

    def controller_request_target(self, described: ClusterDescription) -> int:
        """Return the id of the broker to which clients shall send requests for the controller: usually this broker,
        because every broker can process them.

        Kafka also returns any broker as the controller, and that broker forwards such requests (KIP-590). This broker
        is certainly up, since it responds. A controller that has died would be returned until its session ends, and
        librdkafka would wait for it until its request times out. If this broker cannot change metadata now (its session
        may have expired, or it is stopping), another broker is returned if there is one.
        """
        own, state, cluster = self._settings.node_id, self._topics.state, self._cluster
        if not state.registrations:
            return own
        if cluster is not None and cluster.is_session_valid() and state.may_lead(own):
            return own
        others = [
            broker.node_id
            for broker in described.brokers
            if broker.node_id != own and state.may_lead(broker.node_id)
        ]
        controller_id = described.controller_id
        return controller_id if controller_id in others else min(others, default=own)

    async def describe_topics(
        self,
        names: Collection[str],
        turns: ItemTurns,
        *,
        cursor: Cursor | None = None,
        partitions_max: int = 1,
        caller: Caller,
    ) -> TopicsPage:
        """Describe the topics `names`, or all if it is empty, sorted by name, in pages (KIP-966). Topics that the
        caller may not DESCRIBE are left out, or have the error `TopicAuthorizationFailed` if they are named.

        A page has at most `partitions_max` partitions, and at most `PARTITIONS_PER_PAGE_MAX`. It begins at `cursor`, or
        at the next topic if the topic of the cursor was deleted. Raises `InvalidRequest` for an invalid cursor.
        """
        live = self._topics.state.topics
        wanted = sorted(set(names) or live)
        authorization = self._authorization
        first_name, first_index = cursor or ("", 0)
        if first_index < 0:
            raise InvalidRequest(f"the cursor names partition {first_index}")
        remaining = min(max(partitions_max, 1), PARTITIONS_PER_PAGE_MAX)
        topics: list[DescribedTopic] = []
        wanted = wanted[bisect_left(wanted, first_name) :]
        describable = await authorization.allowed_names_in_turns(
            caller, Operation.DESCRIBE, ResourceType.TOPIC, wanted, turns
        )
        allowed = frozenset(describable)
        for name in wanted if names else describable:
            await turns.next()
            start = first_index if name == first_name else 0
            if remaining == 0:
                return TopicsPage(topics, (name, start))
            if name not in allowed:
                refusal = authorization.refusal(caller, Operation.DESCRIBE, ResourceType.TOPIC, name)
                topics.append(DescribedTopic(name, error=refusal))
                continue
            operations = authorization.authorized_operations(caller, ResourceType.TOPIC, name)
            try:
                if name not in live:
                    check_topic_name(name)
                topic = self._topics.find(name)
            except MansioError as error:
                refused = without_traceback(error)
                topics.append(DescribedTopic(name, error=refused, authorized_operations=operations))
                continue
            count = len(topic.partitions)
            end = min(count, start + remaining)
            topics.append(DescribedTopic(name, topic, range(start, end), authorized_operations=operations))
            remaining -= max(end - start, 0)
            if end < count:
                return TopicsPage(topics, (name, end))
        return TopicsPage(topics)
