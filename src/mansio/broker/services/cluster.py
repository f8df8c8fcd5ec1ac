"""Cluster use case: describe brokers, controller and partitions; the parts that only a broker of a cluster has.

Not obvious:
* This broker's own address is that of the listener through which a client came, not the one in the metadata.
* In a cluster the other brokers are those with a session, and no broker without one is returned as leader. A registered
  broker without a session is *fenced*, and its address is unknown.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mansio.broker.replication.log_repairer import RepairCounts
from mansio.errors import InvalidRequest, InvalidUpdateVersion, LeaderNotAvailable, MansioError
from mansio.metadata.model import BrokerState
from mansio.metadata.topic_plan import check_topic_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mansio.broker.replication.isr_manager import IsrManager
    from mansio.broker.replication.replica_fetcher import ReplicaFetcherManager
    from mansio.broker.services.topics import TopicService
    from mansio.config.settings import Settings
    from mansio.metadata.controller.controller import Controller
    from mansio.metadata.metadata_store import StoreCounts
    from mansio.metadata.model import Topic
    from mansio.metadata.session import Session

    Listener = tuple[str, int]
    """Host and port that are advertised to clients."""

    Cursor = tuple[str, int]
    """Topic and partition with which a page begins."""

NO_CONTROLLER: Final = -1
EPOCH_MASK: Final = (1 << 31) - 1
PARTITIONS_PER_PAGE_MAX: Final = 2000
"""Kafka's max.request.partition.size.limit."""


@dataclass(frozen=True, slots=True)
class ClusterServices:
    """What a broker of a cluster offers in addition to a single node."""

    controller: Controller
    isr_manager: IsrManager
    fetcher_manager: ReplicaFetcherManager
    session: Callable[[], Session | None]
    """This broker's session; None while it has none."""
    is_session_valid: Callable[[], bool]
    """Whether this broker's session has certainly not expired."""
    sessions_lost: Callable[[], int]
    """Number of sessions that ended although this broker kept running."""
    repair_counts: Callable[[], RepairCounts] = RepairCounts
    """Damage that was repaired from other replicas."""
    store_counts: Callable[[], StoreCounts] | None = None
    """Outcomes of calls to the metadata store, where the store counts them."""


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """The brokers with a session, sorted by id, and the ids of the fenced ones. `controller_id` is the active
    controller, `NO_CONTROLLER` if there is none."""

    cluster_id: str
    controller_id: int
    brokers: Sequence[BrokerState]
    fenced: Sequence[int]

    @property
    def alive(self) -> frozenset[int]:
        """Ids of the brokers with a session."""
        return frozenset(broker.node_id for broker in self.brokers)


@dataclass(frozen=True, slots=True)
class DescribedTopic:
    """Partitions of one topic on a page, or the error for which it cannot be described."""

    name: str
    topic: Topic | None = None
    partitions: range = range(0)
    error: MansioError | None = None


@dataclass(frozen=True, slots=True)
class TopicsPage:
    """One page of partitions; `next_cursor` is where the next page begins, None at the end."""

    topics: Sequence[DescribedTopic]
    next_cursor: Cursor | None = None


@dataclass(frozen=True, slots=True)
class QuorumDescription:
    """State of the metadata as this broker knows it. `epoch` is the controller's term; `observer` is None on the
    controller itself."""

    leader_id: int
    epoch: int
    revision: int
    observer: int | None


class ClusterDescriptionService:
    """Describes the cluster as this broker knows it. All methods run on the broker's event loop."""

    __slots__ = ("_cluster", "_settings", "_topics")

    def __init__(self, *, topics: TopicService, settings: Settings, cluster: ClusterServices | None) -> None:
        """`cluster` is None on a single node."""
        self._topics = topics
        self._settings = settings
        self._cluster = cluster

    def describe(self, listener: Listener) -> ClusterDescription:
        """The cluster for a client of this listener. The brokers are never empty for a client that has reached this
        one."""
        own, state = self._settings.node_id, self._topics.state
        known = dict(state.brokers)
        if own in known or not known:
            known[own] = BrokerState(own, *listener, self._settings.broker_rack or None)
        brokers = [known[node_id] for node_id in sorted(known)]
        fenced = [node_id for node_id in sorted(state.registrations) if node_id not in known]
        return ClusterDescription(state.cluster_id, self._controller_id(brokers), brokers, fenced)

    def _controller_id(self, brokers: Sequence[BrokerState]) -> int:
        """A single node is its own controller; in a cluster the current one, while it has a session."""
        state = self._topics.state
        if not state.registrations:
            return brokers[0].node_id
        controller = state.controller
        if controller is None or controller.node_id not in state.brokers:
            return NO_CONTROLLER
        return controller.node_id

    def describe_quorum(self) -> QuorumDescription:
        """The metadata in the form of a KRaft quorum (KIP-595). Raises `LeaderNotAvailable` while there is no
        controller.

        The members of etcd have no broker ids, so the active controller stands for them.
        """
        own, state = self._settings.node_id, self._topics.state
        if not state.registrations:
            return QuorumDescription(own, 0, state.revision, None)
        controller = state.controller
        if controller is None or controller.node_id not in state.brokers:
            raise LeaderNotAvailable("there is no active controller now")
        observer = None if controller.node_id == own else own
        return QuorumDescription(controller.node_id, controller.epoch & EPOCH_MASK, state.revision, observer)

    def update_feature(self, name: str, version: int) -> None:
        """Raises `InvalidUpdateVersion`: there are no finalized features (KIP-584)."""
        raise InvalidUpdateVersion(
            f"feature {name!r} cannot have version {version}: this cluster has no finalized features and no "
            "metadata version"
        )

    def controller_request_target(self, described: ClusterDescription) -> int:
        """The broker to which clients send requests for the controller: this one, which can process them as any other
        can.

        Kafka's brokers also return any broker, and forward such requests (KIP-590). The broker that responds is
        certainly up; a controller that died would be returned until its session ends, and librdkafka waits for it until
        its request times out. A broker that cannot make changes now (its session may have expired, or it is stopping)
        returns another one, if there is one.
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

    def describe_topics(
        self, names: Collection[str], *, cursor: Cursor | None = None, partitions_max: int = 1
    ) -> TopicsPage:
        """Topics by name, or all, sorted, in pages of at most `partitions_max` partitions (KIP-966), bounded.

        A cursor whose topic was deleted continues with the next topic. Raises `InvalidRequest` for an invalid cursor.
        """
        live = self._topics.state.topics
        wanted = sorted(set(names) or live)
        first_name, first_index = cursor or ("", 0)
        if first_index < 0:
            raise InvalidRequest(f"the cursor names partition {first_index}")
        remaining = min(max(partitions_max, 1), PARTITIONS_PER_PAGE_MAX)
        topics: list[DescribedTopic] = []
        for name in wanted[bisect_left(wanted, first_name) :]:
            start = first_index if name == first_name else 0
            if remaining == 0:
                return TopicsPage(topics, (name, start))
            try:
                if name not in live:
                    check_topic_name(name)
                topic = self._topics.find(name)
            except MansioError as error:
                topics.append(DescribedTopic(name, error=error))
                continue
            count = len(topic.partitions)
            end = min(count, start + remaining)
            topics.append(DescribedTopic(name, topic, range(start, end)))
            remaining -= max(end - start, 0)
            if end < count:
                return TopicsPage(topics, (name, end))
        return TopicsPage(topics)
