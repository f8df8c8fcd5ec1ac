"""Members of a share group that work on while their broker dies and comes back, and write down what became of it.

They speak the wire by the codecs, one socket each, and have their leases in mind over a broker's death: what they had
they may still settle. Owns: one thread each for members, a producer and whoever redrives. Always true: what has no
answer is not written down as known; `ShareHistory` judges everything as it comes; what goes wrong is in `failures`.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
from collections import defaultdict
from random import Random
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import InvalidRecordState
from mansio.state.share_partition.types import ACCEPT, REJECT, RELEASE
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import share_acknowledge, share_fetch
from mansio.wire.apis.share_acknowledge import AckBatch, AckPartition
from mansio.wire.batch.priority_header import PRIORITY_HEADER
from mansio.wire.batch.record_batch import build_batch, iterate_batches
from mansio.wire.batch.record_reader import read_records
from support.machine import scaled
from support.raw_peer import RawPeer, batch_of
from support.share_history import Place, ShareHistory
from support.waiting import wait_until
from system.crash.dead_letters import places_of_dead_letters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TYPES: Final = {"accept": ACCEPT, "release": RELEASE, "reject": REJECT}
ANSWER_S: Final = 15.0
RECORDS_AT_ONCE: Final = 12
QUIET_S: Final = 60.0


class Gone(ConnectionError):
    """The broker ended the connection."""


def now_ms() -> float:
    return time.monotonic() * 1000


class Held:
    """One lease as its member has it."""

    __slots__ = ("offset", "partition", "since_ms")

    def __init__(self, partition: int, offset: int, since_ms: float) -> None:
        self.partition = partition
        self.offset = offset
        self.since_ms = since_ms

    @property
    def place(self) -> Place:
        return Place(self.partition, self.offset)


class ShareMember:
    """One member. `accepts_all`: it does nothing but accept, until nothing is left."""

    def __init__(self, load: ShareLoad, name: str, seed: int, *, accepts_all: bool = False) -> None:
        self.load = load
        self.name = name
        self.random = Random(seed)
        self.accepts_all = accepts_all
        self.share_partitions = itertools.count(1)
        self.member = ""
        self.epoch = 0
        self.held: list[Held] = []
        self.last_answer = "nothing"
        """What the broker said last, and where that was."""
        self._numbers = itertools.count(1)

    def run(self) -> None:
        self._be_born()
        while self.load.working(self):
            try:
                with RawPeer(self.load.port) as peer:
                    self.epoch = 0
                    while self.load.working(self):
                        self._round(peer)
                    self._leave()
            except (Gone, OSError) as error:
                self._note(f"its connection ended: {error!r}")
                time.sleep(0.01)  # the broker is not there: the pace of trying again

    def _note(self, what: str) -> None:
        self.last_answer = f"{what}; epoch {self.epoch}, {len(self.held)} in hand, {now_ms():.0f} ms"

    def _be_born(self) -> None:
        self.member = f"{self.name} {next(self.share_partitions)}"
        self.held = []

    def _round(self, peer: RawPeer) -> None:
        if self.epoch == 0:
            self._fetch(peer, 0, {})
            return
        if not self.accepts_all and self.random.random() < 0.02:  # it ends, and another one comes
            self._leave()
            self._be_born()
            raise Gone
        acknowledgements = self._decide()
        if acknowledgements and self.random.random() < 0.5:
            self._acknowledge(peer, acknowledgements)
            acknowledgements = {}
        self._fetch(peer, self.random.randint(1, RECORDS_AT_ONCE), acknowledgements)

    def _leave(self) -> None:
        """Its connection is about to end, and what it has is free then."""
        with self.load.lock:
            self.load.history.gone(self.member, now_ms())

    def _decide(self) -> dict[str, list[Held]]:
        """What it acknowledges of what it has; the rest it keeps for a while, or for longer than it may."""
        chosen: dict[str, list[Held]] = defaultdict(list)
        kept: list[Held] = []
        for one in self.held:
            if self.accepts_all:
                chosen["accept"].append(one)
            elif self.random.random() < 0.3:
                if now_ms() - one.since_ms < 2 * self.load.lock_ms:
                    kept.append(one)
            else:
                redriven = self.load.history.records[one.place].redrives  # dies again, mostly
                weights = (30, 10, 60) if redriven else (80, 12, 8)
                kind = self.random.choices(("accept", "release", "reject"), weights)[0]
                chosen[kind].append(one)
        self.held = kept
        return chosen

    # What is said, and what came of it

    def _topics(self, acknowledgements: dict[str, list[Held]]) -> list[tuple[bytes, list[AckPartition]]]:
        batches: dict[int, list[AckBatch]] = {index: [] for index in range(self.load.partitions)}
        for kind, held in acknowledgements.items():
            for one in held:
                batches[one.partition].append(AckBatch(one.offset, one.offset, bytes([TYPES[kind]])))
        parts = [AckPartition(index, sorted(found)) for index, found in batches.items()]
        return [(self.load.topic_id, parts)]

    def _say(self, acknowledgements: dict[str, list[Held]]) -> None:
        with self.load.lock:
            for kind, held in acknowledgements.items():
                for one in held:
                    self.load.history.acks(self.member, one.partition, [one.offset], kind, now_ms())

    def _acknowledged(self, acknowledgements: dict[str, list[Held]], codes: dict[int, int]) -> None:
        """`codes`: what the broker answered for each partition."""
        with self.load.lock:
            for kind, held in acknowledgements.items():
                for one in held:
                    code = codes.get(one.partition, -1)
                    if code == 0:
                        self.load.history.acknowledged(one.partition, [one.offset], kind, now_ms())
                    elif code == InvalidRecordState.kafka_code:
                        self.load.history.refused += 1

    def _exchange(self, peer: RawPeer, frame: bytes) -> bytes:
        peer.send(frame)
        answer = peer.frame(ANSWER_S)
        if answer is None:
            raise Gone
        return answer

    def _fetch(self, peer: RawPeer, most: int, acknowledgements: dict[str, list[Held]]) -> None:
        load, sent_ms = self.load, now_ms()
        self._say(acknowledgements)
        frame = share_fetch.encode_request(
            2,
            next(self._numbers),
            self.name,
            load.group,
            self.member,
            self.epoch,
            self._topics(acknowledgements),
            max_wait_ms=20,
            min_bytes=1,
            max_bytes=1 << 20,
            max_records=most,
            batch_size=most,
            acquire_mode=share_fetch.RECORD_LIMIT if self.random.random() < 0.5 else 0,
        )
        answer = share_fetch.decode_response(2, self._exchange(peer, frame))
        self._note(f"fetch: {_brief(answer)}")
        if answer.error_code:
            self.epoch = 0
            return
        self.epoch += 1
        parts = [part for _, parts in answer.topics for part in parts]
        self._acknowledged(acknowledgements, {part.index: part.acknowledge_error_code for part in parts})
        for part in parts:
            if part.error_code == 0:
                self._take(part, sent_ms, answer.lock_ms)
        if any(part.error_code for part in parts):
            self._leave()
            raise Gone  # another broker leads, or will

    def _take(self, part: Any, sent_ms: float, lock_ms: int) -> None:
        there = {
            record.offset
            for piece in part.records
            for at, header in iterate_batches(piece)
            for record in read_records(piece[at : at + header.size], output_bytes_max=1 << 24)
        }
        got_ms = now_ms()
        with self.load.lock:
            for first, last, count in part.acquired:
                self.load.history.given(
                    self.member,
                    part.index,
                    first,
                    last,
                    count,
                    sent_ms=sent_ms,
                    got_ms=got_ms,
                    lock_ms=lock_ms,
                )
                for offset in range(first, last + 1):
                    assert offset in there, f"{offset} was leased and its bytes did not come"
                    self.held.append(Held(part.index, offset, sent_ms))

    def _acknowledge(self, peer: RawPeer, acknowledgements: dict[str, list[Held]]) -> None:
        self._say(acknowledgements)
        frame = share_acknowledge.encode_request(
            2,
            next(self._numbers),
            self.name,
            self.load.group,
            self.member,
            self.epoch,
            self._topics(acknowledgements),
        )
        answer = share_acknowledge.decode_response(2, self._exchange(peer, frame))
        self._note(f"acknowledge: {_brief(answer)}")
        if answer.error_code:
            self.epoch = 0
            return
        self.epoch += 1
        self._acknowledged(
            acknowledgements, {part.index: part.error_code for _, parts in answer.topics for part in parts}
        )


def _brief(answer: Any) -> str:
    """An answer without its records."""
    parts = [
        part._replace(records=None) if hasattr(part, "records") else part
        for _, parts in answer.topics
        for part in parts
    ]
    return f"error {answer.error_code} {answer.error_message or ''}, {parts}"


BURST_PROBABILITY = 0.02
BURST_RECORDS = 150
"""Of a key with a backlog: more than may wait beside records of other keys."""


class ShareLoad:
    """See the module."""

    def __init__(
        self,
        bootstrap_servers: str,
        find: Callable[[], int],
        *,
        topic: str,
        group: str,
        lock_ms: int,
        seed: int,
        partitions: int = 2,
        everywhere: Callable[[], Mapping[str, int]] | None = None,
        places: Callable[[], str] = str,
        priorities: bool = False,
        fair: bool = False,
    ) -> None:
        """`find`: the port of the broker that leads all of the topic now. Raises `OSError` when there is none.
        `everywhere`: the ports of all that run; `places`: more that explains why something does not go on;
        `priorities`: the topic has them, and records have random ones, mixed in a batch; `fair`: the group has fairness
        most of the time, and one key has backlogs."""
        self.bootstrap_servers = bootstrap_servers
        self.find = find
        self.everywhere = everywhere or (lambda: {"broker": find()})
        self.places = places
        self.priorities = priorities
        self.fair = fair
        self.partitions = partitions
        self.topic = topic
        self.group = group
        self.lock_ms = lock_ms
        self.random = Random(seed)
        self.history = ShareHistory()
        self.lock = threading.Lock()
        self.failures: list[str] = []
        self.topic_id = b""
        self.killed_ms = 0.0
        self._stop = threading.Event()
        self._drained = threading.Event()
        self._threads: list[threading.Thread] = []
        self._members = itertools.count(1)
        self._alive: list[ShareMember] = []

    @property
    def port(self) -> int:
        return self.find()

    def alter(self, **settings: str) -> None:
        """The group's settings: `mansio_retry_backoff_ms` sets mansio.retry.backoff.ms."""
        changes = [
            {"name": name.replace("_", "."), "config_operation": 0, "value": value}
            for name, value in settings.items()
        ]
        resource = {"resource_type": 32, "resource_name": self.group, "configs": changes}
        with RawPeer(self.port) as peer:
            answer = peer.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource]})
        assert answer.responses[0].error_code == 0, answer

    def begin(self) -> None:
        """The topic is there: set what the group goes by."""
        self.alter(
            share_auto_offset_reset="earliest",
            share_record_lock_duration_ms=str(self.lock_ms),
            share_delivery_count_limit="4",
            mansio_retry_backoff_ms="20",
            mansio_retry_backoff_multiplier="1.5",
            mansio_share_fair=str(self.fair).lower(),
        )
        with RawPeer(self.port) as peer:
            found = peer.call(ApiKey.METADATA, 12, {"topics": [{"name": self.topic, "topic_id": None}]})
            self.topic_id = bytes(found.topics[0].topic_id)

    def start(self, *, members: int) -> None:
        self._spawn(self._produce, "producer")
        self._spawn(self._redrive, "redriver")
        if self.fair:
            self._spawn(self._switch, "switcher")
        for _ in range(members):
            one = ShareMember(self, f"m{next(self._members)}", self.random.getrandbits(32))
            self._alive.append(one)
            self._spawn(one.run, one.name)

    def restarted(self) -> None:
        """The broker that died at `killed_ms` begins again, now."""
        with self.lock:
            self.history.restarted(self.killed_ms, now_ms(), self.lock_ms)

    def working(self, member: ShareMember) -> bool:
        return not (self.failures or (self._drained if member.accepts_all else self._stop).is_set())

    def stop(self) -> None:
        self._stop.set()
        self._drained.set()
        self._join(self._threads)

    def _join(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(scaled(2 * ANSWER_S))
            if thread.is_alive():
                self.failures.append(f"{thread.name} has not ended")

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - reported: a thread that dies in silence would weaken the test
                self.failures.append(f"{name}: {error!r}")

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # The others

    def _produce(self) -> None:
        """Enough that there is always something, and not so much that it is never done."""
        number = itertools.count()
        while not self._stop.is_set():
            try:
                with RawPeer(self.port) as peer:
                    while not self._stop.is_set():
                        values = [b"%d" % next(number) for _ in range(5)]
                        index = next(number) % self.partitions
                        batch = self._batch_of(values)
                        if peer.produce(self.topic, batch, partition=index).error_code:
                            break
                        time.sleep(0.01)
            except (OSError, AssertionError):
                time.sleep(0.01)

    def _batch_of(self, values: list[bytes]) -> bytes:
        if self.priorities:
            return self._prioritized(values)
        return self._keyed(values) if self.fair else batch_of(*values)

    def _keyed(self, values: list[bytes]) -> bytes:
        """Records of a noisy key and of others; sometimes many of the noisy one."""
        stamp_ms = int(time.time() * 1000)
        keys = [self.random.choice((b"noisy", b"noisy", b"%d" % self.random.randrange(40))) for _ in values]
        records = [(stamp_ms, key, value, ()) for key, value in zip(keys, values, strict=True)]
        if self.random.random() < BURST_PROBABILITY:
            records += [(stamp_ms, b"noisy", b"burst", ())] * BURST_RECORDS
        return build_batch(records)

    def _switch(self) -> None:
        """Turn fairness off and on."""
        random = Random(self.random.getrandbits(32))
        while not self._stop.is_set():
            time.sleep(random.uniform(0.05, 0.6))  # the moment is the point
            try:
                self.alter(mansio_share_fair=str(random.random() < 0.8).lower())
            except (OSError, AssertionError):
                continue

    def _prioritized(self, values: list[bytes]) -> bytes:
        stamp_ms = int(time.time() * 1000)
        names = self.random.choices((b"high", b"normal", b"low"), k=len(values))
        return build_batch(
            [
                (stamp_ms, None, value, [(PRIORITY_HEADER, name)])
                for value, name in zip(values, names, strict=True)
            ]
        )

    def _redrive(self) -> None:
        """Every now and then one that is known to have died is offered again; older requests are made again, also
        when their records died a second time and the broker is another process."""
        random = Random(self.random.getrandbits(32))
        asked: list[tuple[str, Place]] = []
        while not self._stop.is_set():
            time.sleep(0.03)
            with self.lock:
                dead = [
                    place for place, one in self.history.records.items() if one.rejected_ms < float("inf")
                ]
            if dead and (not asked or random.random() < 0.3):
                asked.append((f"r{len(asked)}", random.choice(dead)))
            try:
                with RawPeer(self.port) as peer:
                    for each in random.choices(asked[-12:], k=min(len(asked), 3)):
                        self._ask_redrive(peer, *each)
            except (OSError, AssertionError):
                continue

    def _ask_redrive(self, peer: RawPeer, redrive_id: str, place: Place) -> None:
        with self.lock:
            self.history.asks_redrive(redrive_id, place)
        fields = {
            "redrive_id": redrive_id,
            "group_id": self.group,
            "topic_id": self.topic_id,
            "partition_index": place.partition,
            "offsets": [{"first_offset": place.offset, "last_offset": place.offset}],
            "most": 10,
        }
        answer = peer.call(ApiKey.REDRIVE_RECORDS, 0, fields)
        if answer.error_code == 0:
            with self.lock:
                self.history.redriven(redrive_id, place, answer.redriven)

    # The end

    def finish(self) -> None:
        """Have everything settled that is left, and judge. The broker runs, and goes on to."""
        self._stop.set()
        self._join(self._threads)  # or a producer's last batch would come after the end that is looked for
        last = ShareMember(self, "last", self.random.getrandbits(32), accepts_all=True)
        self._spawn(last.run, last.name)
        self._alive.append(last)
        try:
            ends: Any = wait_until(
                lambda: self.failures or self._all_settled(), QUIET_S, "everything is settled"
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.described()}") from None
        self.stop()
        if self.history.breach is not None:
            raise self.history.breach
        assert not self.failures, self.failures
        self.history.finish(ends, self.dead_letters())

    def _all_settled(self) -> dict[int, int]:
        """Where each partition ends, if nothing of the group's is open there; else nothing. The leader is asked again
        each time, and what was written before and is committed only now counts."""
        try:
            with RawPeer(self.port) as peer:
                ends = self._ends(peer)
                parts = [one for topic in self._described(peer).topics for one in topic.partitions]
        except (OSError, AssertionError):
            return {}
        done = all(
            (one.error_code, one.lag, one.archiving) == (0, 0, 0)
            and (self.priorities or self.fair or one.start_offset == ends[one.partition_index])
            for one in parts
        )  # the start of a priority or a backlog queue does not pass later records of others
        return ends if done and len(parts) == self.partitions else {}

    def _ends(self, peer: RawPeer) -> dict[int, int]:
        return {index: peer.end_offset(self.topic, index) for index in range(self.partitions)}

    def described(self) -> str:
        """All that may show why it does not go on: what each broker reports of the group, who leads, what the members
        told last, and where each thread is."""
        lines = [f"now {now_ms():.0f} ms; {self.history}; failures {self.failures}"]
        for name, port in self.everywhere().items():
            try:
                with RawPeer(port) as peer:
                    lines.append(f"{name}: {self._described(peer)}")
                    lines.append(f"{name}: ends {self._ends(peer)}")
            except (OSError, AssertionError) as error:
                lines.append(f"{name}: {error!r}")
        lines += [f"{one.name} ({one.member}) was told: {one.last_answer}" for one in self._alive]
        frames = sys._current_frames()
        for thread in self._threads:
            if (frame := frames.get(thread.ident or 0)) is not None:
                lines.append(f"{thread.name} is at {traceback.extract_stack(frame)[-4:]}")
        return "\n".join([*lines, self.places()])

    def _described(self, peer: RawPeer) -> Any:
        acquirable_ranges = {"topic_id": self.topic_id, "partitions": list(range(self.partitions))}
        fields = {"group_id": self.group, "topics": [acquirable_ranges], "ranges_max": 3}
        return peer.call(ApiKey.DESCRIBE_LEASES, 0, fields)

    def dead_letters(self) -> list[Place]:
        """Where each record of the dead-letter topic comes from."""
        return places_of_dead_letters(self.bootstrap_servers, self.topic, self.group)
