"""Batches whose repeats a thread removes: while it has one, others arrive, ids expire and leaders change."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from mansio.broker.features.deduplication import deduplicator
from mansio.broker.features.deduplication.dedup_control_records import AcceptedIds, decode_dedup_control
from mansio.broker.partition import append_validation
from mansio.broker.partition.batch_processing import BatchProcessor
from mansio.broker.partition.partition_hook import AppendResult
from mansio.errors import MansioError, NotLeaderOrFollower, RequestTimedOut
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER, key_of
from mansio.wire.batch.record_batch import build_batch, read_header
from mansio.wire.batch.record_reader import read_records
from support.partition_bench import WINDOW_MS, deduplicated
from support.tiers import repetitions
from unit.broker.features.deduplication.test_deduplication_replicas import replicate
from unit.broker.test_batch_processing import ManualThread

IDS = 30


class Sent(NamedTuple):
    """A batch that was passed to the processor, and its results."""

    ids: list[int | None]
    sent_ms: int
    outcomes: list[AppendResult | MansioError]


class Stored(NamedTuple):
    """A record in the log. `accepted_ms`: None for a record without id."""

    offset: int
    dedup_id: int | None
    batch: int
    accepted_ms: int | None


def new_batch(number: int, ids: list[int] | list[int | None], codec: Codec) -> bytes:
    """Return a batch of records with these ids, and the number as their value."""
    rows = [
        (1000, None, b"%d" % number, [] if one is None else [(DEDUP_ID_HEADER, b"%d" % one)]) for one in ids
    ]
    return build_batch(rows, codec=codec)


class Model:
    """A leader, the replica that leads in turns with it, and the batches that clients send to the former."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.leader = deduplicated()
        self.other = deduplicated(is_follower=True)
        self.thread = ManualThread()
        self.processor = BatchProcessor(self.thread)
        self.sent: list[Sent] = []

    def step(self) -> None:
        name = self.chance.choices(
            ["send", "run", "advance", "change", "count", "small"], [10, 14, 5, 1, 2, 3]
        )[0]
        if name == "send":
            self.send([self.new_id() for _ in range(self.chance.randrange(2, 6))])
        elif name == "small":
            self.send([self.new_id()])
        elif name == "run":
            if self.thread.jobs:
                self.thread.run()
        elif name == "advance":
            self.leader.clock.seconds += self.chance.random()
        elif name == "count":  # removes ids that have expired
            window = self.leader.deduplication.view.window
            window.make_room(1, 0, self.leader.clock.wall_ms() - WINDOW_MS)
        else:
            self.change_leader()

    def new_id(self) -> int | None:
        return None if self.chance.random() < 0.2 else self.chance.randrange(IDS)

    def send(self, ids: list[int | None]) -> None:
        number = len(self.sent)
        sent = Sent(ids, self.leader.clock.wall_ms(), [])
        self.sent.append(sent)
        batch = new_batch(number, ids, self.chance.choice((Codec.NONE, Codec.ZSTD)))
        self.processor.append(self.leader.partition, batch, urgent=True, on_appended=sent.outcomes.append)

    def change_leader(self) -> None:
        """Let the other replica lead and accept ids, then the first one again."""
        leader, other = self.leader, self.other
        leader.flush()
        while other.log.end_offset < leader.log.end_offset:
            replicate(leader, other)
        other.clock.seconds = leader.clock.seconds
        epoch = leader.partition.leader_epoch
        leader.partition.become_follower(2, epoch + 1)
        other.partition.become_leader(epoch + 1, in_sync=[1], replicas=[1])
        for _ in range(self.chance.randrange(4)):
            batch = new_batch(-1, [self.chance.randrange(IDS) for _ in range(3)], Codec.NONE)
            other.partition.append(batch, is_checked=True)
            other.clock.seconds += self.chance.random() / 10
        if self.chance.random() < 0.3 and self.thread.jobs:
            self.thread.run()  # while another broker leads
        other.flush()
        while leader.log.end_offset < other.log.end_offset:
            replicate(other, leader)
        other.partition.become_follower(2, epoch + 2)
        leader.partition.become_leader(epoch + 2, in_sync=[1], replicas=[1])
        leader.scheduler.run()

    def stored(self) -> list[Stored]:
        found: list[Stored] = []
        accepted: AcceptedIds | None = None
        for batch in self.leader.log.batches(0):
            if read_header(batch).is_control:
                content = decode_dedup_control(batch)
                accepted = content if isinstance(content, AcceptedIds) else None
                continue
            for record in read_records(batch):
                one = next((int(value or b"") for name, value in record.headers), None)
                accepted_ms = None
                if one is not None:
                    assert accepted is not None
                    assert key_of(b"%d" % one) in accepted.keys
                    accepted_ms = accepted.accepted_ms
                number = int(record.value or b"")
                found.append(Stored(record.offset, one, number, accepted_ms))
        return found

    def check(self) -> None:
        while self.thread.jobs:
            self.thread.run()
        stored = self.stored()
        last: dict[int, Stored] = {}
        for record in stored:
            if record.dedup_id is None or record.accepted_ms is None:
                continue
            earlier = last.get(record.dedup_id)
            assert earlier is None or (earlier.accepted_ms or 0) <= record.accepted_ms - WINDOW_MS, "twice"
            last[record.dedup_id] = record
        for number, sent in enumerate(self.sent):
            (outcome,) = sent.outcomes
            own = [record for record in stored if record.batch == number]
            if isinstance(outcome, MansioError):
                assert type(outcome) in (NotLeaderOrFollower, RequestTimedOut)
                continue
            assert len([record for record in own if record.dedup_id is None]) >= sent.ids.count(None)
            for one in sent.ids:
                assert one is None or any(
                    record.dedup_id == one and (record.accepted_ms or 0) > sent.sent_ms - WINDOW_MS
                    for record in stored
                    if record.offset < outcome.end_offset
                ), "lost"
            first = next(record for record in stored if record.offset == outcome.base_offset)
            assert first.dedup_id == sent.ids[0]


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_validation, "INLINE_RECORDS_MAX", 1)


@pytest.mark.parametrize(
    "seeds",
    [range(15), pytest.param(range(15, repetitions(100, 300)), marks=pytest.mark.full)],
    ids=["few", "many"],
)
def test_no_id_is_stored_twice_and_none_is_lost_while_the_thread_has_batches(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    rebuilds: list[int] = []
    real = deduplicator.rebuild

    def counted(*arguments: object) -> object:
        rebuilds.append(len(arguments))
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(deduplicator, "rebuild", counted)
    appended = 0
    for seed in seeds:
        model = Model(seed)
        for _ in range(150):
            model.step()
        model.check()
        appended += sum(isinstance(sent.outcomes[0], AppendResult) for sent in model.sent)
    assert appended > 10 * len(seeds)
    assert len(rebuilds) > 10 * len(seeds)
