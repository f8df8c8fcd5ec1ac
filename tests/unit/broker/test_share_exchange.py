"""The short path of a share request gives the results of the general path, whatever happened before."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.api.kafka.handlers.share import share_fetch
from mansio.broker.services.share_groups.exchange import ShareExchange, plan_exchange
from mansio.errors import InvalidRecordState, NotCoordinator, NotLeaderOrFollower
from mansio.state.share_partition.types import (
    ACCEPT,
    REJECT,
    RELEASE,
    AcknowledgementBatch,
    AcquiredRange,
    ShareKey,
)
from mansio.storage.segment_list import LogSlice
from mansio.wire.apis.share_fetch import RECORD_LIMIT
from mansio.wire.batch.record_batch import build_batch
from support.waiting import eventually
from unit.broker.share_fixtures import ShareBench, part_of, run
from unit.broker.test_share_fetch import LONG_MS, ack, code_of, on_loaded
from unit.broker.test_share_partition_leader import SETTINGS, TOPIC, SharePartitionBench

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mansio.broker.coordinator.share.partition_leader import SharePartitionLeader

GROUP = "g"
PLACE = (TOPIC, 0)
BATCHES = (1, 1, 3, 1, 10, 2, 1, 1, 5, 75)
"""Records of the batches of the log, 100 in total."""
ALL_SETTINGS = (
    SETTINGS,
    SETTINGS._replace(record_locks_max=6, lease_bound_step=8),
    SETTINGS._replace(in_flight_batches_max=4),
    SETTINGS._replace(is_fair=True),
    SETTINGS._replace(is_fair=True, record_locks_max=6, lease_bound_step=8, in_flight_batches_max=4),
)


class BatchLog:
    """A log of `BATCHES`; a record takes one byte."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        for size in BATCHES:
            first = self.ranges[-1][1] + 1 if self.ranges else 0
            self.ranges.append((first, first + size - 1))

    def batches(self, offset: int) -> Iterator[bytes]:
        """For fairness, which reads the keys: no key has a backlog."""
        for first, last in self.ranges:
            if last >= offset:
                records = [(0, b"%d" % number, b"", ()) for number in range(first, last + 1)]
                yield build_batch(records, base_offset=first)

    def read_range(self, first: int, last: int, max_bytes: int, limit: int) -> LogSlice | None:
        found: list[tuple[int, int]] = []
        for begin, end in self.ranges:
            if end < first or end >= limit:
                continue
            if begin > last or (found and end - found[0][0] + 1 > max_bytes):
                break
            found.append((begin, end))
        if not found:
            return None
        file: Any = None
        return LogSlice(file, found[0][0], found[-1][1] - found[0][0] + 1, found[-1][1] + 1)


class Bench(SharePartitionBench):
    """A share partition with a log; requests go the short path if they can, or never."""

    def __init__(self, settings_: Any, *, is_short: bool) -> None:
        super().__init__()
        self.settings = settings_
        self.is_short = is_short
        self.short_count = 0
        self.partition.log = BatchLog()
        self.partition.producers = None
        self.leader: SharePartitionLeader = self.share_partition()
        self.scheduler.run(self.shares.load(GROUP, PLACE))

    def request(
        self,
        member: str,
        accepted: list[tuple[int, int]],
        max_records: int,
        max_bytes: int,
        *,
        strict: bool,
        lease_ms: int = -1,
    ) -> tuple[Sequence[AcquiredRange], LogSlice | None, int]:
        """Accept and lease, in one millisecond. Returns the leased ranges, their records, and the duration of the
        leases."""
        end_ms = self.scheduler.now_ms + 1
        try:
            return self._request(member, accepted, max_records, max_bytes, strict=strict, lease_ms=lease_ms)
        finally:
            self.scheduler.pass_time(end_ms - self.scheduler.now_ms)

    def _request(
        self,
        member: str,
        accepted: list[tuple[int, int]],
        max_records: int,
        max_bytes: int,
        *,
        strict: bool,
        lease_ms: int = -1,
    ) -> tuple[Sequence[AcquiredRange], LogSlice | None, int]:
        plans = None
        if self.is_short:
            plans = plan_exchange(
                self.shares,
                GROUP,
                member,
                (PLACE, accepted) if accepted else None,
                [PLACE] if max_records else [],
                max_records=max_records,
                max_bytes=max_bytes,
                strict=strict,
            )
        if plans is not None:
            self.short_count += 1
            exchange = ShareExchange(plans, lambda _: None)
            exchange.start(member, lease_ms)
            self.scheduler.pass_time(0)
            assert exchange.is_complete
            received, _ = exchange.results()
            usual = exchange.usual_result()
            if PLACE not in received:
                assert usual is None
                return (), None, 0
            found = received[PLACE]
            assert usual is not None
            assert [usual[1]] == list(found.acquired)
            return found.acquired, found.slices[0], exchange.lock_ms
        updates = []
        if accepted:
            batches = [AcknowledgementBatch(*each, bytes((ACCEPT,))) for each in accepted]
            updates.append(self.leader.acknowledge(member, batches))
        leased = None
        if max_records:
            leased = self.leader.acquire(
                member, max_records, max_bytes, strict=strict, is_first=True, lease_ms=lease_ms
            )
            if leased is not None:
                updates.append(leased.update)
        stored = [each for each in updates if each is not None]
        if stored:
            self.scheduler.run(self.leader.persist(*stored))
        if leased is None or not leased.acquired:
            return (), None, 0
        return leased.acquired, leased.slices[0], SETTINGS.lock_ms if lease_ms < 0 else lease_ms

    def end(self, member: str, first: int, last: int, type_: int) -> None:
        update = self.leader.acknowledge(member, [AcknowledgementBatch(first, last, bytes((type_,)))])
        if update is not None:
            self.scheduler.run(self.leader.persist(update))

    def held(self, member: str) -> list[tuple[int, int]]:
        machine = self.leader.state_machine
        return [
            (each.first, each.last) for each in machine.ranges if each.holder == member and each.state == 1
        ]

    def state(self) -> Any:
        machine = self.leader.state_machine
        ranges = [tuple(getattr(each, name) for name in type(each).__slots__) for each in machine.ranges]
        return (
            ranges,
            machine.counts(self.scheduler.now_ms),
            machine.lease_bound,
            self.known_state.state(ShareKey(GROUP, TOPIC, 0)),
        )


steps = st.lists(
    st.tuples(
        st.sampled_from(["request", "request", "request", "request", "release", "reject", "expire", "split"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 4),  # ranges to accept
        st.sampled_from([0, 1, 1, 1, 2, 7, 40]),  # records
        st.sampled_from([1, 4, 1000]),  # bytes
        st.booleans(),
        st.sampled_from([-1, -1, 10, 100_000]),  # duration of the leases
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=300)
@given(steps=steps, settings_=st.sampled_from(ALL_SETTINGS))
def test_the_short_path_of_a_request_gives_the_results_of_the_general_one(
    steps: list[tuple[str, str, int, int, int, bool, int]], settings_: Any
) -> None:
    """Also that of a fair group without a backlog, compared with a group without fairness."""
    both = [Bench(settings_, is_short=True), Bench(settings_._replace(is_fair=False), is_short=False)]
    for kind, member, accepted_count, max_records, max_bytes, strict, lease_ms in steps:
        results = []
        for bench in both:
            held = bench.held(member)
            if kind == "request":
                accepted = held[:accepted_count]
                results.append(
                    bench.request(member, accepted, max_records, max_bytes, strict=strict, lease_ms=lease_ms)
                )
            elif kind == "split" and held and held[0][0] < held[0][1]:
                results.append(bench.request(member, [(held[0][0], held[0][0])], 1, max_bytes, strict=strict))
            elif kind in ("release", "reject") and held:
                bench.end(member, *held[-1], RELEASE if kind == "release" else REJECT)
            elif kind == "expire":
                bench.scheduler.pass_time(SETTINGS.lock_ms + 1)
        if results:
            assert results[0] == results[1]
        assert both[0].state() == both[1].state()


@pytest.mark.parametrize("is_fair", [False, True])
def test_the_usual_requests_take_the_short_path(*, is_fair: bool) -> None:
    bench = Bench(SETTINGS._replace(is_fair=is_fair), is_short=True)
    acquired, _, _ = bench.request("a", [], 1, 1000, strict=True)
    for _ in range(20):
        acquired, _, _ = bench.request(
            "a", [(each.first, each.last) for each in acquired], 1, 1000, strict=True
        )
    assert acquired == [AcquiredRange(20, 20, 1)]
    assert bench.short_count == 20, "all but the first, which learns where the log starts"


def test_records_that_another_member_holds_are_left_to_the_general_path() -> None:
    bench = Bench(SETTINGS, is_short=True)
    bench.request("a", [], 3, 1000, strict=True)
    for member, accepted in (("b", [(0, 0)]), ("a", [(0, 3)]), ("a", [(1, 1), (1, 1)]), ("a", [(5, 5)])):
        plans = plan_exchange(
            bench.shares,
            GROUP,
            member,
            (PLACE, accepted),
            [PLACE],
            max_records=1,
            max_bytes=1000,
            strict=True,
        )
        assert plans is None, (member, accepted)


def test_a_lease_is_not_reported_after_its_update_has_failed_or_the_leader_has_changed() -> None:
    for failure in ("write", "leader"):
        bench = Bench(SETTINGS, is_short=True)
        bench.request("a", [], 1, 1000, strict=True)
        plans = plan_exchange(
            bench.shares,
            GROUP,
            "a",
            (PLACE, [(0, 0)]),
            [PLACE],
            max_records=1,
            max_bytes=1000,
            strict=True,
        )
        assert plans is not None
        completed: list[ShareExchange] = []
        exchange = ShareExchange(plans, completed.append)
        if failure == "write":
            bench.known_state.fail(1, NotCoordinator("moved"))
        exchange.start("a", -1)
        if failure == "leader":
            bench.partition.is_leader = False
        bench.scheduler.pass_time(1)
        assert completed == [exchange]
        received, results = exchange.results()
        assert exchange.usual_result() is None
        if failure == "write":
            assert not received
            assert isinstance(results[0].error, NotCoordinator)
        else:
            assert isinstance(received[PLACE].error, NotLeaderOrFollower)
            assert results[0].error is None


def test_the_duration_of_the_leases_is_that_of_the_leased_records() -> None:
    bench = Bench(SETTINGS, is_short=True)
    other = (TOPIC, 1)
    bench.scheduler.run(bench.shares.load(GROUP, other))
    for place in (PLACE, other):
        bench.shares.find(GROUP, place).leaders[0].ready_state_machine()
    for accepted, leased, lease_ms, lock_ms in (
        (None, PLACE, 2_000, 2_000),
        ((PLACE, [(0, 0)]), other, 2_000, 2_000),
        ((other, [(0, 0)]), None, 2_000, SETTINGS.lock_ms),
    ):
        plans = plan_exchange(
            bench.shares,
            GROUP,
            "a",
            accepted,
            [] if leased is None else [leased],
            max_records=1,
            max_bytes=1000,
            strict=True,
        )
        assert plans is not None
        exchange = ShareExchange(plans, lambda _: None)
        exchange.start("a", lease_ms)
        bench.scheduler.pass_time(1)
        received, results = exchange.results()
        assert list(received) == ([] if leased is None else [leased])
        assert [(each.error, each.partition) for each in results] == (
            [(None, accepted[0][1])] if accepted else []
        )
        assert exchange.lock_ms == lock_ms


def test_a_defect_in_the_second_share_partition_is_an_error_of_its_records_only() -> None:
    bench = Bench(SETTINGS, is_short=True)
    bench.request("a", [], 1, 1000, strict=True)
    bench.scheduler.run(bench.shares.load(GROUP, (TOPIC, 1)))
    bench.shares.find(GROUP, (TOPIC, 1)).leaders[0].ready_state_machine()
    plans = plan_exchange(
        bench.shares,
        GROUP,
        "a",
        (PLACE, [(0, 0)]),
        [(TOPIC, 1)],
        max_records=1,
        max_bytes=1000,
        strict=True,
    )
    assert plans is not None
    broken = [plan._replace(leased=(0, 1, 2)) if plan.leased else plan for plan in plans]  # type: ignore[arg-type]  # a defect
    completed: list[ShareExchange] = []
    exchange = ShareExchange(broken, completed.append)
    exchange.start("a", -1)
    bench.scheduler.pass_time(1)
    assert completed == [exchange]
    received, results = exchange.results()
    assert not received
    assert results[0].error is None


@pytest.mark.parametrize("ends", ["connection", "session"])
def test_what_is_leased_while_the_session_ends_is_free_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 1, 1, 1, 1)
        other = await room.peer("m2")
        await other.fetch(0)
        part_of(await peer.fetch(1, wait_ms=5000, acquire_mode=RECORD_LIMIT))
        release = room.known_state.hold(1)
        monkeypatch.delattr(share_fetch, "_ShareFetch")  # the general path
        waiting = asyncio.create_task(peer.fetch(1, acks=[ack(0, 0)], acquire_mode=RECORD_LIMIT))
        await eventually(lambda: room.known_state._held == {})
        monkeypatch.undo()
        if ends == "connection":
            peer.close()
        else:
            again = await room.peer()
            assert (await again.acknowledge(epoch=-1)).error_code == 0
        await eventually(lambda: not room.service.share_partition_manager.sessions.has_session("g", "m1"))
        release()
        leader = room.service.share_partition_manager.share_partitions()[0]
        await eventually(lambda: not leader.state_machine.leased_count)
        found = part_of(await other.fetch(1, wait_ms=LONG_MS, acquire_mode=RECORD_LIMIT))
        assert found.acquired == [(1, 1, 2)]
        with suppress(asyncio.IncompleteReadError):
            await waiting

    run(check, tmp_path)


def test_a_type_for_a_range_of_any_length_takes_no_memory(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 1, 1)
        part_of(await peer.fetch(1, wait_ms=5000, acquire_mode=RECORD_LIMIT))
        for kind in (RELEASE, ACCEPT):
            answer = await peer.acknowledge(ack(0, 2**62, kind))
            assert code_of(answer) == InvalidRecordState.kafka_code
        assert code_of(await peer.acknowledge(ack(0, 0))) == 0

    run(check, tmp_path)
