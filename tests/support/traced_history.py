"""Random histories of a partition and a share group, with the trace that a broker writes of them, and what happened.

The share partition, what it reports, the blocks and the timeline are the real ones. What is simulated are the processes
that lead the partition one after the other, the log of the trace, and the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import MansioError
from mansio.state.share_partition.machine import SharePartition
from mansio.state.share_partition.types import (
    ACCEPT,
    ACKNOWLEDGED,
    ACQUIRED,
    ARCHIVED,
    REJECT,
    RELEASE,
    AcknowledgementBatch,
    Backoff,
    LoadedState,
    Producer,
    ShareKey,
    ShareSettings,
    Update,
)
from mansio.state.trace.coverage import Coverage, TracedRow
from mansio.state.trace.timeline import RecordFacts, Timeline, build_timeline
from mansio.state.trace.trace_buffer import NameTable, PartitionTrace, SealedRows, TraceBuffer
from mansio.wire.internal_records.trace_records import BlockHeader, TraceBlock, encode_block

if TYPE_CHECKING:
    from random import Random

TOPIC_ID = b"t" * 16
GROUP = "g"
LOCK_MS = 5_000
SETTINGS = ShareSettings(LOCK_MS, 3, 50, 100, 100, False, True, True, Backoff(0, 1.0, 0, 0.0))
MEMBERS = ("m1", "m2", "m3")
START_MS = 1_790_000_000_000


class Done(NamedTuple):
    """What was done with a record, as the timeline names it."""

    kind: str
    attempt: int
    who: str


class Client:
    """A publisher."""

    def __init__(self, name: str) -> None:
        self.trace_name = name


class Process:
    """A broker process that leads the partition."""

    def __init__(self, broker_id: int, now_ms: int) -> None:
        self.broker_id, self.incarnation, self.sealed_ms = broker_id, now_ms, now_ms
        self.buffer = TraceBuffer()
        self.sequence = 0

    def seal(self) -> SealedRows:
        return self.buffer.seal()


class History:
    """One random history. `truth`: by offset, what was done with it, in order."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now_ms = START_MS
        self.is_single_node = random.random() < 0.3
        """Whether the process is always that of the same broker, in the same leader epoch."""
        self.epoch = -1
        self.end = 0
        self.log: list[bytes] = []
        self.truth: dict[int, list[Done]] = {}
        self.publishers = [Client("a@1"), Client("b@2")]
        self.state = LoadedState(0, 0, 0, 0, 100, 0, (), (), (), None, True, 0)
        self.sequence = 0
        self.is_on = True
        self.is_lossy = False
        """Whether something was done of which no row was written."""
        self.trace: PartitionTrace | None = None
        self.begin_process(is_turned_on=False)

    # ------------------------------------------------------------------ who leads

    def begin_process(self, *, is_turned_on: bool) -> None:
        self.tick(self.random.randint(1, 50))
        is_single_node = self.is_single_node
        if not is_single_node or self.epoch < 0:
            self.epoch += 1
        self.process = Process(1 if is_single_node else self.random.randint(1, 3), self.now_ms)
        self.lead(is_turned_on=is_turned_on)
        if is_single_node:
            self.flush()  # a single node writes that it leads before it serves clients

    def lead(self, *, is_turned_on: bool) -> None:
        if self.is_on:
            self.trace = self.process.buffer.lead(
                TOPIC_ID, 0, self.epoch, self.now_ms, is_turned_on=is_turned_on
            )
        self.load()

    def load(self) -> None:
        now = float(self.now_ms - START_MS)
        self.machine = SharePartition(
            ShareKey(GROUP, TOPIC_ID, 0), SETTINGS, self.state, leader_epoch=self.epoch, log_start=0,
            log_end=self.end, high_watermark=self.end, now_ms=now, wall_ms=self.now_ms,
        )  # fmt: skip
        if self.trace is not None:
            self.trace.report_loaded(GROUP, self.state.changes, self.now_ms)

    def fail_over(self) -> None:
        """A process is killed: what it has not written is lost."""
        self.is_lossy |= self.process.buffer.has_events
        self.trace = None
        self.begin_process(is_turned_on=False)

    def hand_over(self) -> None:
        """A process ends in an orderly way, or gives the partition to another one."""
        if self.trace is not None:
            self.trace.end(self.now_ms)
            self.trace = None
        self.flush()
        self.begin_process(is_turned_on=False)

    def turn(self) -> None:
        """Turn the trace off, or on."""
        self.is_on = not self.is_on
        if self.trace is not None:
            self.trace.end(self.now_ms, is_turned_off=True)
            self.trace = None
        self.lead(is_turned_on=True)

    # ------------------------------------------------------------------ what is written

    def flush(self) -> None:
        self.tick(1)
        self.write(self.process.seal())

    def drop(self) -> None:
        """A block finds the queue full."""
        self.tick(1)
        rows = self.process.seal()
        self.is_lossy |= bool(rows.row_count)
        self.process.buffer.drop(rows.row_count + rows.dropped)

    def write(self, sealed: SealedRows) -> None:
        process = self.process
        if not sealed.row_count and not sealed.dropped:
            return
        names = NameTable()
        packed = list(sealed.pack(names, process.sealed_ms, self.now_ms))
        header = BlockHeader(
            0, 0, process.broker_id, process.incarnation, process.sequence,
            process.sealed_ms, self.now_ms, sealed.dropped, 0, 0, 0, 0,
        )  # fmt: skip
        self.log.append(encode_block(header, packed, names.names()))
        if self.random.random() < 0.1:
            self.log.append(self.log[-1])  # its outcome was unknown
        process.sequence += 1
        process.sealed_ms = self.now_ms

    # ------------------------------------------------------------------ what is done

    def tick(self, ms: int) -> None:
        self.now_ms += ms

    def publish(self) -> None:
        count = self.random.randint(1, 3)
        publisher = self.random.choice(self.publishers)
        base, self.end = self.end, self.end + count
        for offset in range(base, self.end):
            self.truth[offset] = [Done("published", 0, publisher.trace_name)]
        self.machine.high_watermark = self.end
        trace = self.trace
        if trace is None:
            self.is_lossy = True
        elif trace.publisher is publisher and trace.run_end == base and self.now_ms <= trace.run_until_ms:
            trace.run_end = self.end
        else:
            trace.begin_run(publisher, base, self.end, self.now_ms)

    def store(self, update: Update | None, kinds: dict[int, Done]) -> None:
        """`kinds`: what the update means for each offset."""
        if update is None:
            return
        self.machine.mark_persisted(update.token)
        for offset, done in kinds.items():
            self.truth[offset].append(done)
        if self.trace is not None:
            self.trace.report_updates(GROUP, [update], self.now_ms)
        elif kinds:
            self.is_lossy = True
        self.state = self.machine.snapshot(float(self.now_ms - START_MS))

    def leases(self) -> dict[int, tuple[str, int]]:
        return {
            offset: (each.holder, each.deliveries)
            for each in self.machine.ranges
            if each.state == ACQUIRED
            for offset in range(each.first, each.last + 1)
        }

    def deliver(self) -> None:
        member, now = self.random.choice(MEMBERS), float(self.now_ms - START_MS)
        ranges = self.machine.acquirable_ranges(member, self.random.randint(1, 4), self.end, now)
        acquired, update = self.machine.acquire(
            member, ranges, self.random.randint(1, 4), strict=True, batch_ends=(), now_ms=now
        )
        done = {
            offset: Done("delivered", each.deliveries, member)
            for each in acquired
            for offset in range(each.first, each.last + 1)
        }
        self.store(update, done)

    def acknowledge(self) -> None:
        leased = self.leases()
        if not leased:
            return
        offset = self.random.choice(sorted(leased))
        member, attempt = leased[offset]
        kind = self.random.choice((ACCEPT, ACCEPT, RELEASE, REJECT))
        batch = AcknowledgementBatch(offset, offset, bytes([kind]))
        try:
            update = self.machine.acknowledge(
                member, [batch], float(self.now_ms - START_MS), self.now_ms, self.random.random()
            )
        except MansioError:
            return
        name = {ACCEPT: "acknowledged", RELEASE: "released", REJECT: "rejected"}[kind]
        if kind == RELEASE and attempt >= SETTINGS.delivery_limit + self.uncounted(offset):
            name = "attempts-used-up"
        self.store(update, {offset: Done(name, attempt, member)})

    def uncounted(self, offset: int) -> int:
        return next(e.uncounted_deliveries for e in self.machine.ranges if e.first <= offset <= e.last)

    def leave(self) -> None:
        member = self.random.choice(MEMBERS)
        ended = {}
        for offset, (holder, attempt) in self.leases().items():
            if holder == member:
                # The delivery does not count: see `release_member`.
                used_up = attempt - self.uncounted(offset) - 1 >= SETTINGS.delivery_limit
                ended[offset] = Done("attempts-used-up" if used_up else "released", attempt, member)
        self.store(self.machine.release_member(member, float(self.now_ms - START_MS)), ended)

    def expire(self) -> None:
        self.tick(LOCK_MS + 1)
        ended = {}
        for offset, (holder, attempt) in self.leases().items():
            used_up = attempt - self.uncounted(offset) >= SETTINGS.delivery_limit
            ended[offset] = Done("attempts-used-up" if used_up else "expired", attempt, holder)
        self.store(self.machine.tick(float(self.now_ms - START_MS), self.now_ms, 0.5), ended)

    def bury(self) -> None:
        """Copy what waits for it to the dead-letter topic."""
        places, done = [], {}
        for each in self.machine.archiving_ranges():
            reservation = each.reservation._replace(
                topic_id=b"d" * 16, partition=0, producer_id=7, epoch=0, sequence=self.sequence
            )
            places.append((each.first, each.last, reservation))
            self.sequence += each.last - each.first + 1
            for offset in range(each.first, each.last + 1):
                done[offset] = Done("dead-lettered", each.deliveries, each.reservation.consumer)
        if places:
            producer = Producer(7, 0, ((b"d" * 16, 0, self.sequence),))
            self.store(self.machine.reserve(producer, places), {})
            self.store(self.machine.mark_archived(places), done)

    def redrive(self) -> None:
        now, chosen = float(self.now_ms - START_MS), None
        before = {
            offset: each.deliveries
            for each in self.machine._dead.ranges()
            for offset in range(each.first, each.last + 1)
        }
        if self.random.random() < 0.5 and before:
            offset = self.random.choice(sorted(before))
            chosen = [(offset, offset)]
        update, _ = self.machine.redrive(f"r{self.now_ms}", chosen, 2, now)
        if update is not None:
            after = {
                offset for each in self.machine._dead.ranges() for offset in range(each.first, each.last + 1)
            }
            self.store(
                update, {o: Done("redriven", count, "") for o, count in before.items() if o not in after}
            )

    # ------------------------------------------------------------------ the whole

    def run(self, steps: int, *, disturbances: bool) -> None:
        calm = [self.publish, self.deliver, self.deliver, self.acknowledge, self.acknowledge, self.acknowledge,
                self.leave, self.expire, self.bury, self.redrive, self.flush, self.flush, self.hand_over]  # fmt: skip
        rough = [self.fail_over, self.drop, self.turn] if disturbances else []
        self.publish()
        for _ in range(steps):
            self.tick(self.random.randint(1, 400))
            self.random.choice(calm * 4 + rough)()
        self.flush()

    def timelines(self) -> dict[int, Timeline]:
        coverage: dict[tuple[int, int], Coverage] = {}
        blocks = [TraceBlock(each) for each in self.log]
        seen = set()
        found: dict[int, list[TracedRow]] = {offset: [] for offset in self.truth}
        for block in blocks:
            header = block.header
            process = (header.broker_id, header.incarnation)
            coverage.setdefault(process, Coverage(*process)).add(header)
            if (*process, header.sequence) in seen:
                continue
            seen.add((*process, header.sequence))
            for entry in block.entries_of(TOPIC_ID, 0):
                for offset, rows in found.items():
                    if entry.first <= offset < entry.end:
                        rows += [
                            TracedRow(row, *process, entry.leader_epoch)
                            for row in block.rows(entry, [offset])
                        ]
        live = (self.process.broker_id, self.process.incarnation)
        for one in coverage.values():
            one.is_live = (one.broker_id, one.incarnation) == live
        return {
            offset: build_timeline(
                offset, rows, tuple(coverage.values()),
                RecordFacts(is_stored=True, timestamp_ms=START_MS), self.now_ms,
            )
            for offset, rows in found.items()
        }  # fmt: skip

    def states(self) -> dict[int, int]:
        return {
            offset: each.state
            for each in self.machine.ranges
            for offset in range(each.first, each.last + 1)
            if each.state in (ACKNOWLEDGED, ARCHIVED)
        }
