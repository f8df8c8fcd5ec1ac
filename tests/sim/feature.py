"""A simulated history of one feature of partitions: its topic, its faults, and its scene of clients and a judge.

`sim.features` is the table of features. A feature whose replicas have a view of the log, as delayed records or
deduplication, has a `ViewScene`: producers of its records, readers, and a history that reads all logs before leaders
delete anything.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast
from unittest.mock import patch

from mansio.broker.partition.partition import Partition
from mansio.wire.apis import produce as produce_wire
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch, read_header
from sim.clients import DUPLICATE_SEQUENCE, LOOK_AGAIN, OUT_OF_ORDER, PRODUCE_VERSION, TOPIC, Producer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mansio.wire.batch.record_batch import BatchHeader
    from sim.admin import Administrator
    from sim.brokers import SimulatedBroker
    from sim.world import World

SINGLE_EVERY: Final = 4
"""Every so many histories of a view have a single node without etcd."""
CLUSTER_FAULTS: Final = {"clock jump": 4, "power loss of all": 4, "leader moved": 6, "full disk": 4}
"""Faults that are drawn more often than in other histories."""
SINGLE_FAULTS: Final = {
    "kill": 4,
    "power loss": 6,
    "clean restart": 3,
    "pause": 3,
    "clock jump": 4,
    "drop": 2,
    "delay": 1,
    "reorder": 2,
    "duplicate": 3,
    "failed sync": 2,
    "full disk": 4,
    "slow disk": 3,
}
"""The faults of a single node."""


class Until(Protocol):
    """Runs the history until a condition holds, at most so many ms; the text names what was waited for."""

    def __call__(self, condition: Callable[[], bool], within_ms: float, what: str, /) -> None: ...


class Feature(NamedTuple):
    """Histories of seeds from `first_seed` up to those of the next feature. `configs`: of the topic, by seed."""

    first_seed: int
    partitions: int
    configs: Callable[[int], dict[str, str]]
    settings: Mapping[str, int]
    """Of brokers."""
    scene: Callable[[World], FeatureScene]
    single_every: int = SINGLE_EVERY
    """0: all histories have a cluster, of the size of other histories."""
    cluster_faults: Mapping[str, int] = CLUSTER_FAULTS
    faults: Mapping[str, tuple[Callable[[World], bool], int]] = {}
    """Faults that only these histories have, and how often they are drawn."""
    faults_ms: float | None = None
    """For how long faults are drawn; None: as long as in other histories."""
    fault_every_ms_max: int | None = None

    def is_single_node(self, seed: int) -> bool:
        return self.single_every > 0 and seed % self.single_every == 0


class FeatureScene:
    """The clients of a history of one feature, and its judge."""

    has_schedules = False
    """While schedules fire, logs do not come to rest."""
    constants: Sequence[tuple[Any, str, int]] = ()
    """Bounds that a history of some seconds would not reach: module, name, smaller value."""

    def __init__(self, world: World, history: Any) -> None:
        self.world = world
        self.history = history

    def begin_clients(self) -> None:
        """Start producers and readers. Clients of other histories there are none."""
        world = self.world
        world.administrator = cast("Administrator", SimpleNamespace(done=True, made=0))
        world.committers, world.members = [], []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Smaller bounds while the history runs."""
        with ExitStack() as stack:
            for module, name, value in self.constants:
                stack.enter_context(patch.object(module, name, value))
            yield

    def reasons(self) -> Iterator[str]:
        """Why it is not all well."""
        raise NotImplementedError

    def drain(self, until: Until) -> None:
        """After the faults: wait until the feature has nothing to do any more."""
        raise NotImplementedError

    def check_end(self) -> None:
        """Compare logs, views and what clients received."""
        raise NotImplementedError


class ViewScene(FeatureScene):
    """A scene of a feature with a view of each replica's log. `history` has `read` for committed records and `finish`
    for the end."""

    partitions: int

    def find_manager(self, broker: SimulatedBroker, partition: Partition) -> Any:
        """What manages the feature of a partition on a broker; it has `partition` and `view`."""
        raise NotImplementedError

    def check_replica(self, manager: Any) -> None:
        """Compare the view of a replica with its log."""
        raise NotImplementedError

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Smaller bounds, and everything is read before leaders delete it."""
        history, trim = self.history, Partition.trim

        def trim_after_reading(partition: Partition, start_offset: int) -> None:
            if partition.topic == TOPIC:
                history.read(partition)
            trim(partition, start_offset)

        with super().watched(), patch.object(Partition, "trim", trim_after_reading):
            yield

    def managers(self, index: int) -> list[Any]:
        """Of the replicas of a partition on brokers that run."""
        found = []
        for broker in self.world.brokers():
            if broker.closed or not broker.running or not hasattr(broker, "core"):
                continue
            partition = broker.core.partitions.get(TOPIC, index)
            if partition is None or partition.closed:
                continue
            manager = self.find_manager(broker, partition)
            if manager is not None:
                found.append(manager)
        return found

    def leader(self, index: int) -> Any:
        return next((one for one in self.managers(index) if one.partition.is_leader), None)

    def reasons(self) -> Iterator[str]:
        for index in range(self.partitions):
            for manager in self.managers(index):
                name = f"broker {manager.partition.broker_id}, {manager.partition.name}:"
                for reason in self.reasons_of(manager):
                    yield f"{name} {reason}"

    def reasons_of(self, manager: Any) -> Iterator[str]:
        """Why it is not all well with one replica: its view is being read."""
        if not manager.replay.is_complete:
            yield f"the view ends at {manager.replay.applied_end} of {manager.partition.end_offset}"

    def check_end(self) -> None:
        for index in range(self.partitions):
            for manager in self.managers(index):
                self.check_replica(manager)
                if manager.partition.is_leader:
                    self.history.read(manager.partition)
        self.history.finish()


class UnreadBatches:
    """The committed batches of logs, each once. `broken` is called when one was deleted before."""

    def __init__(self, broken: Callable[[str], object]) -> None:
        self._broken = broken
        self._read_to: dict[int, int] = {}

    def of(self, partition: Partition) -> Iterator[tuple[BatchHeader, bytes]]:
        """What is committed in a replica's log and was not read before."""
        index, log = partition.index, partition.log
        begin, end = self._read_to.get(index, 0), partition.high_watermark
        if begin >= end:
            return
        if log.start_offset > begin:
            self._broken(f"{partition.name} begins at {log.start_offset}, read up to {begin}")
        for batch in log.batches(begin):
            header = read_header(batch)
            if header.last_offset >= end:
                break
            self._read_to[index] = header.last_offset + 1
            yield header, batch


class FeatureProducer(Producer):
    """A producer of batches that the feature's scene judges."""

    def build(self, records: list[Any]) -> bytes:
        """A batch, with a sequence number if the producer is idempotent."""
        return build_batch(
            records,
            codec=self.random.choice((Codec.NONE, Codec.NONE, Codec.GZIP)),
            producer_id=self.producer[0] if self.idempotent else -1,
            producer_epoch=self.producer[1] if self.idempotent else -1,
            base_sequence=self.sequence if self.idempotent else -1,
        )

    async def send_once(
        self, batch: bytes, count: int, on_acknowledged: Callable[[int], None], *, repeats: bool
    ) -> bool:
        """Send a batch of `count` records. Returns `repeats` where it may not be stored, so that it is sent again.

        `on_acknowledged` is called with its base offset.
        """
        topics = [(TOPIC, None, [(self.index, batch)])]
        frame = await self.ask(
            lambda number: b"".join(
                produce_wire.encode_request(PRODUCE_VERSION, number, self.name, -1, 2000, topics)
            )
        )
        if frame is None:
            self.last_error = "no answer"
            await self.find_leader(self.index)
            return repeats
        result = produce_wire.decode_response(PRODUCE_VERSION, frame).topics[0][2][0]
        if result.error_code == DUPLICATE_SEQUENCE and self.idempotent:
            self.sequence += count
            return False
        if result.error_code == 0:
            self.acknowledged += count
            on_acknowledged(result.base_offset)
            self.sequence += count
            return False
        self.last_error = result.error_code
        if result.error_code in LOOK_AGAIN:
            await self.find_leader(self.index)
        if self.idempotent and result.error_code == OUT_OF_ORDER:
            self.world.checker.broken(f"{self.name} sent the next sequence and was refused")
        return repeats
