"""Transactions in simulated histories: producers with transactional ids write to several partitions, and consume,
transform and produce with their offsets in the transaction; readers of committed records read all along.

Some transactions are committed, some aborted, some exceed their timeout. Producers die in the middle of a transaction
and are replaced by a successor with the same transactional id; some of them come back as zombies later and go on. In a
third of the histories epochs are exhausted soon.

In histories with an odd seed all producers speak the second transaction protocol (KIP-890: Produce 12, TxnOffsetCommit
5, EndTxn 5). In the others half of them speak the first one (AddPartitionsToTxn, one epoch for many transactions). A
copy of a request of the first protocol that arrives seconds later, or of a marker, cannot be told from one of the next
transaction; the network makes none there.

`sim.transaction_history` judges. The logs are read with code of their own: batch by batch, with the markers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.broker.coordinator.transaction import marker_sender
from mansio.broker.log_view import snapshots
from mansio.state.transactions import transaction as machine
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch as fetch_wire
from mansio.wire.apis import produce as produce_wire
from mansio.wire.batch.end_marker import decode_end_marker
from mansio.wire.batch.isolation_filter import visible_batches
from mansio.wire.batch.record_batch import build_batch, read_header
from mansio.wire.batch.record_reader import read_records
from mansio.wire.codec import messages
from sim import workload_clients
from sim.clients import DUPLICATE_SEQUENCE, FETCH_VERSION, LOOK_AGAIN, OUT_OF_ORDER, TOPIC, Client, Producer
from sim.feature import Feature, FeatureScene, Until
from sim.transaction_history import Consumed, LoggedRecord, TransactionHistory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.broker.partition.partition import Partition
    from mansio.wire.batch.record_batch import BatchHeader
    from sim.world import World

FIRST_SEED: Final = 3_000_000
"""Histories from this seed on are of transactions only."""

PARTITIONS: Final = 3
INPUT: Final = 2
"""The partition that groups consume; they produce to the others."""
WRITERS: Final = ("w1", "w2", "w3")
MOVERS: Final = ("m1", "m2")
FAULTS_MS: Final = 4_500
FAULT_EVERY_MS_MAX: Final = 1500
DRAIN_MS_MAX: Final = 60_000

CONFIGS: Final = {"segment.bytes": "4096"}
SETTINGS: Final = {"transaction_state_log_num_partitions": 2}
CLUSTER_FAULTS: Final = {
    "kill": 8,
    "power loss": 8,
    "power loss of all": 3,
    "leader moved": 8,
    "clock jump": 2,
    "isolated": 5,
}
"""Faults that are drawn more often than in other histories."""
CONSTANTS: Final = (
    (snapshots, "SNAPSHOT_INTERVAL_BYTES", 3000),
    (marker_sender, "MARKERS_TIMEOUT_MS", 4000),
)
"""Bounds that a history of some seconds would not reach."""
SOON_EXHAUSTED_EPOCH: Final = 12

REQUEST_TIMED_OUT: Final = 7
INVALID_TIMESTAMP: Final = 32
"""The clock of a broker is far from that of the producer."""
TRANSIENT: Final = LOOK_AGAIN | {REQUEST_TIMED_OUT, 8, 14, 19, 20, 56, INVALID_TIMESTAMP}
INVALID_PRODUCER_EPOCH: Final = 47
INVALID_TXN_STATE: Final = 48
INVALID_PRODUCER_ID_MAPPING: Final = 49
CONCURRENT_TRANSACTIONS: Final = 51
UNSTABLE_OFFSET_COMMIT: Final = 88
PRODUCER_FENCED: Final = 90
TRANSACTION_ABORTABLE: Final = 120
FENCING: Final = (INVALID_PRODUCER_EPOCH, INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED)

ATTEMPTS_MAX: Final = 8
TIMEOUTS_MS: Final = (800, 2000, 5000)


def configs_of(seed: int) -> dict[str, str]:
    """Settings of the topic."""
    del seed
    return dict(CONFIGS)


class Fenced(Exception):
    """Another instance has the transactional id, or the transaction has exceeded its timeout."""


class Aborts(Exception):
    """The transaction has to be aborted."""


class Restarts(Exception):
    """The outcome is unknown: the producer initializes itself again."""


class Transactions(FeatureScene):
    """The clients of a history of transactions, and its judge."""

    history: TransactionHistory

    def __init__(self, world: World) -> None:
        super().__init__(world, TransactionHistory(world.checker.broken))
        soon_exhausted = (machine, "PRODUCER_EPOCH_MAX", SOON_EXHAUSTED_EPOCH)
        self.constants = [*CONSTANTS, soon_exhausted] if world.seed % 3 == 0 else CONSTANTS
        self.transactors: list[Transactor] = []
        self.watchers: list[OffsetWatcher] = []
        self.instances: dict[str, int] = {}
        """The newest instance of each transactional id; it need not be initialized yet."""
        self.newest: dict[str, Transactor] = {}
        self.is_mixed = world.seed % 2 == 0
        """Whether some producers speak the first protocol."""
        world.network.is_faithful = self._is_faithful

    def begin_clients(self) -> None:
        super().begin_clients()
        world = self.world
        world.producers = [PlainProducer(world, "i2", INPUT, idempotent=True, pace_ms=250)]
        world.readers = [
            CommittedReader(world, f"{kind}{index}", index, jumps=kind == "j")
            for kind in "rj"
            for index in range(PARTITIONS)
        ]
        for transactional_id in (*WRITERS, *MOVERS):
            self.succeed(transactional_id)
        self.watchers = [OffsetWatcher(world, group_of(each), self) for each in MOVERS]

    def succeed(self, transactional_id: str) -> None:
        """Begin another producer with this transactional id."""
        kind = Mover if transactional_id in MOVERS else Transactor
        number = sum(one.transactional_id == transactional_id for one in self.transactors)
        one = kind(self.world, self, transactional_id, f"{transactional_id}/{number}")
        self.transactors.append(one)
        self.newest[transactional_id] = one

    def next_instance(self, transactional_id: str) -> int:
        self.instances[transactional_id] = self.instances.get(transactional_id, 0) + 1
        return self.instances[transactional_id]

    def _is_faithful(self, request: bytes) -> bool:
        return self.is_mixed and int.from_bytes(request[4:6], "big") == ApiKey.WRITE_TXN_MARKERS

    # The end

    def reasons(self) -> Iterator[str]:
        """Why it is not all well: producers at work, open transactions, input that is not consumed."""
        for one in self.transactors:
            if not one.done:
                yield f"{one.name} is at work: {one.doing}"
        for broker in self.world.brokers():
            coordinator = broker.core.transactions
            for entry in () if coordinator is None else coordinator.store.entries.values():
                if entry.transactional_id in coordinator.store.ongoing or entry.transaction.is_prepared:
                    yield f"{broker.name}: {entry.transactional_id} is {entry.transaction.state.title}"
            for partition in workload_clients.partitions_of(broker):
                if partition.is_leader and partition.producers and partition.producers.transactions.open:
                    yield f"{broker.name}, {partition.name}: open {partition.producers.transactions.open}"
        for watcher in self.watchers:
            mover = self.newest[watcher.transactional_id]
            assert isinstance(mover, Mover)
            if max(watcher.offset, 0) != mover.committed_position:
                yield f"{watcher.name} is at {watcher.offset} of {mover.committed_position}"

    def drain(self, until: Until) -> None:
        until(lambda: not any(self.reasons()), DRAIN_MS_MAX, "end of transactions")

    def check_end(self) -> None:
        for broker in self.world.brokers():
            for partition in workload_clients.partitions_of(broker):
                if partition.topic == TOPIC:
                    self._check_replica(partition)
        self.history.finish()

    def _check_replica(self, partition: Partition) -> None:
        """Read a log; the index of aborted transactions of each replica matches its log."""
        records, aborted = read_log(partition)
        assert partition.producers is not None
        found = [one[:3] for one in partition.producers.transactions.aborted()]
        if found != aborted:
            self.world.checker.broken(
                f"broker {partition.broker_id}, {partition.name}: aborted {aborted} in the log, {found} in the index"
            )
        if partition.is_leader:
            self.history.add_log(partition.index, records)


def read_log(partition: Partition) -> tuple[list[LoggedRecord], list[tuple[int, int, int]]]:
    """The records of a log with their outcome, and (producer id, first offset, offset of the marker) of its aborted
    transactions."""
    records: dict[int, LoggedRecord] = {}
    open_offsets: dict[int, list[int]] = {}
    aborted: list[tuple[int, int, int]] = []
    for batch in partition.log.batches(partition.log.start_offset):
        header = read_header(batch)
        if header.is_control:
            marker = decode_end_marker(batch)
            offsets = open_offsets.pop(header.producer_id, []) if marker is not None else []
            for offset in offsets:
                assert marker is not None
                records[offset] = records[offset]._replace(is_committed=marker.is_commit)
            if offsets and marker is not None and not marker.is_commit:
                aborted.append((header.producer_id, offsets[0], header.base_offset))
            continue
        outcome = None if header.is_transactional else True
        for record in read_records(batch, output_bytes_max=1 << 24):
            records[record.offset] = LoggedRecord(record.offset, (record.value or b"").strip(), outcome)
            if header.is_transactional:
                open_offsets.setdefault(header.producer_id, []).append(record.offset)
    return list(records.values()), aborted


def group_of(transactional_id: str) -> str:
    return f"group of {transactional_id}"


class PlainProducer(Producer):
    """An idempotent producer without transactions."""

    async def _send(self, values: list[bytes]) -> bool:
        assert isinstance(self.world.scene, Transactions)
        history = self.world.scene.history
        history.send_plain(self.index, values)
        before = self.acknowledged
        again = await super()._send(values)
        if self.acknowledged > before:
            history.acknowledge_plain(values)
        return again


class LinkedClient(Client):
    """A client that keeps one connection to each broker."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._links: dict[int, Any] = {}
        self._known: dict[tuple[str, str | int], int] = {}

    async def ask_of(self, what: tuple[str, str | int], encode: Callable[[int], bytes]) -> bytes | None:
        """Ask the leader (`("leader", index)`) or the coordinator (`("group", id)`, `("transaction", id)`)."""
        if what not in self._known:
            await self._locate(what)
        self.node_id = self._known.get(what, self.node_id)
        self._link = self._links.get(self.node_id)
        frame = await self.ask(encode)
        self._links[self.node_id] = self._link
        if frame is None:
            self.forget(what)
        return frame

    async def request(
        self, what: tuple[str, str | int], api_key: ApiKey, version: int, fields: dict[str, Any]
    ) -> Any:
        """The response; None when there was none in time."""
        frame = await self.ask_of(
            what, lambda number: messages.encode_request(api_key, version, number, self.name, fields)
        )
        return None if frame is None else messages.decode_response_frame(api_key, version, frame)[1]

    def forget(self, what: tuple[str, str | int]) -> None:
        self._known.pop(what, None)

    async def _locate(self, what: tuple[str, str | int]) -> None:
        kind, name = what
        self.elsewhere()
        self._link = self._links.get(self.node_id)
        if kind == "leader":
            found = await self.call(ApiKey.METADATA, 12, {"topics": [{"name": TOPIC, "topic_id": None}]})
            for topic in () if found is None else found.topics:
                for one in topic.partitions:
                    if one.partition_index == name and one.leader_id >= 0:
                        self._known[what] = one.leader_id
        else:
            fields = {"key_type": int(kind == "transaction"), "coordinator_keys": [name]}
            found = await self.call(ApiKey.FIND_COORDINATOR, 4, fields)
            if found is not None and found.coordinators[0].error_code == 0:
                self._known[what] = found.coordinators[0].node_id
        if self._link is not None:
            self._links[self._link.target] = self._link


class Transactor(LinkedClient):
    """A producer with a transactional id, from its first initialization until it dies, is fenced by a successor or the
    history ends."""

    def __init__(self, world: World, transactions: Transactions, transactional_id: str, name: str) -> None:
        super().__init__(world, name)
        self.transactions = transactions
        self.history = transactions.history
        self.transactional_id = transactional_id
        self.bumps = self.random.random() < 0.5 or not transactions.is_mixed
        """Whether it speaks the second protocol."""
        self.faithful = not self.bumps
        """A late EndTxn of the first protocol could end the next transaction."""
        self.timeout_ms = self.random.choice(TIMEOUTS_MS)
        self.producer = (-1, -1)
        self.instance = 0
        self.count = 0
        self.sequences: dict[int, int] = {}
        self.done = False
        self.doing = ""
        self.run(self._run())

    @property
    def is_replaced(self) -> bool:
        return self.transactions.newest[self.transactional_id] is not self

    @property
    def is_over(self) -> bool:
        return self.world.writes_end

    async def _run(self) -> None:
        try:
            while not (self.is_over or self.is_replaced):
                if await self._initialize():
                    await self._work()
        finally:
            self.done = True

    async def _initialize(self) -> bool:
        """Initialize a new instance; False if there is a successor."""
        self.doing = "initialization"
        producer = self.producer if self.random.random() < 0.5 else (-1, -1)  # KIP-360
        instance = self.transactions.next_instance(self.transactional_id)
        while not (self.world.over or self.is_replaced):
            answer = await self.request(
                ("transaction", self.transactional_id),
                ApiKey.INIT_PRODUCER_ID,
                5 if self.bumps else 4,
                {
                    "transactional_id": self.transactional_id,
                    "transaction_timeout_ms": self.timeout_ms,
                    "producer_id": producer[0],
                    "producer_epoch": producer[1],
                },
            )
            code = REQUEST_TIMED_OUT if answer is None else answer.error_code
            if code == 0:
                if not self.is_replaced:
                    self.history.initialize(self.transactional_id, instance)
                self.instance, self.producer = instance, (answer.producer_id, answer.producer_epoch)
                self.sequences.clear()
                return not self.is_replaced
            if code in FENCING:
                producer = (-1, -1)
            await self._pause("transaction", self.transactional_id, code)
        return False

    async def _pause(self, kind: str, name: str | int, code: int) -> None:
        """Before another attempt after an error."""
        if code in TRANSIENT:
            self.forget((kind, name))
        elif code not in (CONCURRENT_TRANSACTIONS, UNSTABLE_OFFSET_COMMIT, *FENCING):
            self.world.checker.broken(f"{self.name}: error {code} of {kind} {name} during {self.doing}")
        self.doing = f"{self.doing.partition(':')[0]}: {kind} {name}, error {code}"
        await self.sleep(self.random.uniform(20, 150))

    # Transactions

    async def _work(self) -> None:
        """Transactions until something ends this instance."""
        try:
            while not self.is_over:
                await self.sleep(self.random.uniform(5, 120))
                if not await self._transaction():
                    return
        except Fenced:
            self.producer = (-1, -1)
        except Restarts:
            return

    async def _transaction(self) -> bool:
        """One transaction; False if the producer dies in it."""
        self.count += 1
        name = f"{self.name}.{self.instance}:{self.count}"
        fate = self.random.random()
        if fate < 0.04:
            return self._die()
        parts = await self._parts(name)
        if not parts:
            return True
        self.history.begin(name, self.transactional_id, self.instance)
        naps_at = self.random.randrange(len(parts) + 1) if fate < 0.09 else -1
        dies_at = self.random.randrange(len(parts) + 1) if 0.09 <= fate < 0.14 else -1
        commits = fate < 0.82
        try:
            if not self.bumps:
                await self._add_partitions([index for index, _ in parts])
            for number, (index, values) in enumerate(parts):
                if naps_at == number:
                    await self._nap()
                if dies_at == number:
                    return self._die()
                self.history.send(name, index, values)
                await self._produce(index, values)
            await self._send_offsets(name)
            if naps_at == len(parts):
                await self._nap()
            if dies_at == len(parts):
                return self._die()
        except Aborts:
            if not self.bumps:
                raise Restarts from None  # a batch whose outcome is unknown has a sequence in this epoch
            commits = False
        await self._end(name, commits=commits)
        return True

    async def _parts(self, name: str) -> list[tuple[int, list[bytes]]]:
        """What to write: partitions and values."""
        indexes = self.random.sample(range(PARTITIONS), self.random.randint(1, PARTITIONS))
        if self.random.random() < 0.3:
            indexes.append(indexes[0])
        return [
            (index, [f"{name}:{at}.{number}".encode() for number in range(self.random.choice((1, 1, 3)))])
            for at, index in enumerate(indexes)
        ]

    def _die(self) -> bool:
        self.transactions.succeed(self.transactional_id)
        return False

    async def _nap(self) -> None:
        """Do nothing for long, while a successor begins; then go on as though nothing had happened."""
        if not self.is_replaced:
            self.transactions.succeed(self.transactional_id)
        self.doing = "a nap"
        await self.sleep(self.random.choice((200, 1500, 4000)) * self.random.uniform(0.3, 1.5))

    async def _add_partitions(self, indexes: list[int]) -> None:
        self.doing = "AddPartitionsToTxn"
        fields = {
            "v3_and_below_transactional_id": self.transactional_id,
            "v3_and_below_producer_id": self.producer[0],
            "v3_and_below_producer_epoch": self.producer[1],
            "v3_and_below_topics": [{"name": TOPIC, "partitions": sorted(set(indexes))}],
        }

        def code_of(answer: Any) -> int:
            results = answer.results_by_topic_v3_and_below[0].results_by_partition
            return next((one.partition_error_code for one in results if one.partition_error_code), 0)

        await self._ask_coordinator(
            "transaction", self.transactional_id, ApiKey.ADD_PARTITIONS_TO_TXN, 3, fields, code_of
        )

    async def _ask_coordinator(
        self,
        kind: str,
        name: str,
        api_key: ApiKey,
        version: int,
        fields: dict[str, Any],
        code_of: Callable[[Any], int],
    ) -> Any:
        """Ask until it succeeds."""
        while not self.world.over:
            answer = await self.request((kind, name), api_key, version, fields)
            if answer is None and not self.bumps:
                raise Restarts
            code = REQUEST_TIMED_OUT if answer is None else code_of(answer)
            if code == 0:
                return answer
            self._raise_if_fatal(code)
            await self._pause(kind, name, code)
        raise Restarts

    def _raise_if_fatal(self, code: int) -> None:
        if code in FENCING:
            raise Fenced
        if code in (INVALID_TXN_STATE, TRANSACTION_ABORTABLE):
            raise Aborts

    async def _produce(self, index: int, values: list[bytes]) -> None:
        self.doing = f"Produce to {index}"
        sequence = self.sequences.get(index, 0)
        self.world.checker.sent(index, values, once=True)
        padding = b" " * self.random.choice((0, 0, 300))
        batch = build_batch(
            [(self.world.wall_ms(), None, value + padding, ()) for value in values],
            producer_id=self.producer[0],
            producer_epoch=self.producer[1],
            base_sequence=sequence,
            transactional=True,
        )
        version, topics = 12 if self.bumps else 11, [(TOPIC, None, [(index, batch)])]
        for _ in range(ATTEMPTS_MAX):
            frame = await self.ask_of(
                ("leader", index),
                lambda number: b"".join(
                    produce_wire.encode_request(
                        version, number, self.name, -1, 2000, topics, self.transactional_id
                    )
                ),
            )
            code = REQUEST_TIMED_OUT
            if frame is not None:
                code = produce_wire.decode_response(version, frame).topics[0][2][0].error_code
            elif not self.bumps:
                raise Restarts
            if code in (0, DUPLICATE_SEQUENCE):
                self.sequences[index] = sequence + len(values)
                return
            self._raise_if_fatal(code)
            if code == OUT_OF_ORDER:
                self.world.checker.broken(f"{self.name} sent the next sequence to {index} and was refused")
            await self._pause("leader", index, code)
        raise Aborts

    async def _send_offsets(self, name: str) -> None:
        """The offsets of the consumed input, if there is any."""

    async def _end(self, name: str, *, commits: bool) -> None:
        self.doing = "EndTxn"
        is_zombie = self.history.is_zombie(self.transactional_id, self.instance)
        if commits:
            self.history.request_commit(name)
        fields = {
            "transactional_id": self.transactional_id,
            "producer_id": self.producer[0],
            "producer_epoch": self.producer[1],
            "committed": commits,
        }
        try:
            answer = await self._ask_coordinator(
                "transaction",
                self.transactional_id,
                ApiKey.END_TXN,
                5 if self.bumps else 4,
                fields,
                lambda answer: answer.error_code,
            )
        except Aborts:
            raise Restarts from None
        if is_zombie:
            self.world.checker.broken(f"{self.name} is a zombie and has ended {name}")
        if self.bumps:
            self.producer = (answer.producer_id, answer.producer_epoch)
            self.sequences.clear()
        if commits:
            self.history.acknowledge_commit(name)
            self._committed()

    def _committed(self) -> None:
        """The transaction was committed."""


class Mover(Transactor):
    """Consumes the input, transforms it and produces it to the other partitions, until all of it is consumed."""

    def __init__(self, world: World, transactions: Transactions, transactional_id: str, name: str) -> None:
        self.group = group_of(transactional_id)
        self.position = self.next_position = self.committed_position = 0
        super().__init__(world, transactions, transactional_id, name)

    @property
    def is_over(self) -> bool:
        """When the end of the input has come to rest and is consumed."""
        return self.world.writes_end and self.is_at_end

    @property
    def is_at_end(self) -> bool:
        world = self.world
        if world.over:
            return True
        topic = world.brokers()[0].core.state.topics[TOPIC] if world.brokers()[0].ready else None
        if topic is None or not world.healed_ms or self.is_replaced:
            return self.is_replaced
        copies = workload_clients.copies(world, topic.topic_id, INPUT)
        ends = {(one.end_offset, one.last_stable_offset) for one in copies if one.is_leader}
        writers_done = all(one.done or isinstance(one, Mover) for one in self.transactions.transactors)
        return writers_done and ends == {(self.position, self.position)}

    async def _work(self) -> None:
        self.doing = "OffsetFetch"
        offset = await fetch_offset(self, self.group, requires_stable=True)
        while offset is None and not self.world.over and not self.is_replaced:
            await self.sleep(self.random.uniform(20, 150))
            offset = await fetch_offset(self, self.group, requires_stable=True)
        if offset is None or self.is_replaced:
            return
        self.position = self.committed_position = max(offset, 0)
        await super()._work()

    async def _parts(self, name: str) -> list[tuple[int, list[bytes]]]:
        self.doing = f"Fetch from {self.position}"
        self.next_position = self.position
        found = await fetch_committed(self, self.name, INPUT, self.position, 2000)
        if found is None:
            await self.sleep(self.random.uniform(20, 150))
            return []
        records, self.next_position = found
        if not records:
            self.position = self.next_position
            return []
        parts: dict[int, list[bytes]] = {}
        for offset, _ in records:
            parts.setdefault(offset % INPUT, []).append(f"{name}:{offset}".encode())
        return list(parts.items())

    async def _send_offsets(self, name: str) -> None:
        consumed = Consumed(self.group, self.committed_position, self.next_position)
        self.history.send_offsets(name, consumed)
        producer = {
            "transactional_id": self.transactional_id,
            "producer_id": self.producer[0],
            "producer_epoch": self.producer[1],
            "group_id": self.group,
        }
        if not self.bumps:
            self.doing = "AddOffsetsToTxn"
            await self._ask_coordinator(
                "transaction",
                self.transactional_id,
                ApiKey.ADD_OFFSETS_TO_TXN,
                3,
                producer,
                lambda answer: answer.error_code,
            )
        self.doing = "TxnOffsetCommit"
        partition = {
            "partition_index": INPUT,
            "committed_offset": consumed.end,
            "committed_leader_epoch": -1,
            "committed_metadata": "",
        }
        fields = {
            **producer,
            "generation_id": -1,
            "member_id": "",
            "group_instance_id": None,
            "topics": [{"name": TOPIC, "partitions": [partition]}],
        }
        await self._ask_coordinator(
            "group",
            self.group,
            ApiKey.TXN_OFFSET_COMMIT,
            5 if self.bumps else 3,
            fields,
            lambda answer: answer.topics[0].partitions[0].error_code,
        )

    def _committed(self) -> None:
        self.position = self.committed_position = self.next_position


class OffsetWatcher(LinkedClient):
    """Reads the committed offset of a group over and over."""

    def __init__(self, world: World, group: str, transactions: Transactions) -> None:
        super().__init__(world, f"watcher of {group}")
        self.group = group
        self.transactional_id = group.rpartition(" ")[2]
        self.history = transactions.history
        self.offset = -1
        self.run(self._run())

    async def _run(self) -> None:
        while not self.world.over:
            await self.sleep(self.random.uniform(50, 300))
            offset = await fetch_offset(self, self.group, requires_stable=self.random.random() < 0.5)
            if offset is not None and not self.world.is_misled(self.node_id):
                self.history.read_offset(self.group, offset, by=self.name)
                self.offset = offset


class CommittedReader(LinkedClient):
    """Reads committed records of one partition. `jumps`: it begins again somewhere now and then, and reads records of
    open and aborted transactions, too."""

    def __init__(self, world: World, name: str, index: int, *, jumps: bool) -> None:
        super().__init__(world, name)
        self.index = index
        self.jumps = jumps
        self.position = 0
        self.last_error: object = None
        self.run(self._run())

    async def _run(self) -> None:
        while not self.world.over:
            if self.jumps and not self.world.writes_end and self.random.random() < 0.1:
                self.position = self.random.randint(0, self.position)
            await self.sleep(self.random.uniform(20, 200) if await self._read() else 100)

    async def _read(self) -> bool:
        is_committed = not self.jumps or self.random.random() < 0.5
        found = await fetch_committed(
            self, self.name, self.index, self.position, 8192, is_committed=is_committed
        )
        if found is not None:
            self.position = found[1]
        return found is not None


async def fetch_offset(client: LinkedClient, group: str, *, requires_stable: bool) -> int | None:
    """The committed offset of a group, -1 for none; None if there was no answer."""
    wanted = {
        "group_id": group,
        "member_id": None,
        "member_epoch": -1,
        "topics": [{"name": TOPIC, "partition_indexes": [INPUT]}],
    }
    fields = {"groups": [wanted], "require_stable": requires_stable}
    answer = await client.request(("group", group), ApiKey.OFFSET_FETCH, 8, fields)
    if answer is None:
        return None
    found = answer.groups[0]
    code = found.error_code or found.topics[0].partitions[0].error_code
    if code:
        if code != UNSTABLE_OFFSET_COMMIT:
            client.forget(("group", group))
        return None
    offset: int = found.topics[0].partitions[0].committed_offset
    return offset


async def fetch_committed(
    client: LinkedClient,
    reader: str,
    index: int,
    position: int,
    max_bytes: int,
    *,
    is_committed: bool = True,
) -> tuple[list[tuple[int, bytes]], int] | None:
    """The committed records from a position on, and the next position; None if there was no good answer. Reports the
    history. Without `is_committed` all records are read, and only their values checked."""
    world = client.world
    wanted = fetch_wire.FetchPartition(index, -1, position, -1, -1, max_bytes)
    frame = await client.ask_of(
        ("leader", index),
        lambda number: fetch_wire.encode_request(
            FETCH_VERSION,
            number,
            client.name,
            [(TOPIC, None, [wanted])],
            max_wait_ms=client.random.choice((0, 100, 400)),
            min_bytes=1,
            max_bytes=max_bytes,
            isolation_level=int(is_committed),
        ),
    )
    if frame is None:
        return None
    answer = fetch_wire.decode_response(FETCH_VERSION, frame).topics[0][2][0]
    if answer.error_code:
        client.forget(("leader", index))
        return None
    assert isinstance(world.scene, Transactions)
    history = world.scene.history
    link = client._links[client.node_id]
    where = f"{reader} at {link.served_by.name}"
    if is_committed:
        history.read_stable_offset(where, index, answer.last_stable_offset, answer.high_watermark)
    records, end = [], position
    batches = memoryview(answer.records or b"")
    for at, header, is_visible in visible_batches(
        batches, (TOPIC, index), position, answer.aborted_transactions or (), is_committed
    ):
        _check_bound(
            world, reader, header, answer.last_stable_offset if is_committed else answer.high_watermark
        )
        end = header.last_offset + 1
        if is_visible:
            for record in read_records(batches[at : at + header.size], output_bytes_max=1 << 20):
                if record.offset >= position:
                    value = (record.value or b"").strip()
                    records.append((record.offset, value))
                    world.checker.read(index, record.offset, value, by=reader)
    if is_committed:
        history.read(reader, index, position, end, records)
    return records, end


def _check_bound(world: World, reader: str, header: BatchHeader, bound: int) -> None:
    if header.last_offset >= bound:
        world.checker.broken(f"{reader} reads {header.last_offset}, and the end is {bound}")


FEATURE: Final = Feature(
    FIRST_SEED,
    PARTITIONS,
    configs_of,
    SETTINGS,
    Transactions,
    single_every=0,
    cluster_faults=CLUSTER_FAULTS,
    faults_ms=FAULTS_MS,
    fault_every_ms_max=FAULT_EVERY_MS_MAX,
)
