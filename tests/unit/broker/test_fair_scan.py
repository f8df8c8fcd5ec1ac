"""Reading of the keys for a fair group: nothing is offered before its isolation is stored, and nothing is forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from mansio.broker.coordinator.share import fair_scan
from mansio.broker.coordinator.share.fair_scan import FairScan, load_index, undone_ranges_of
from mansio.broker.coordinator.share.share_partition_manager import share_settings
from mansio.state.share_partition.fairness import fair_index
from mansio.state.share_partition.fairness.fair_index import BACKLOG_MAX, FairIndex
from mansio.state.share_partition.machine import SharePartition
from mansio.state.share_partition.offset_numbers import NumberedRange
from mansio.state.share_partition.types import (
    BACKLOG_QUEUES,
    BASE,
    OPEN_END,
    DeadRange,
    Isolation,
    LoadedState,
    ShareKey,
    StateBatch,
)
from mansio.testing.scheduler import Simulation
from mansio.wire.batch.record_batch import build_batch
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pytest

    from mansio.broker.coordinator.share.fair_scan import FairLeader

QUEUE = BACKLOG_QUEUES[0]
BATCH_RECORDS = 50
FAIR = share_settings({"mansio.share.fair": "true"}, is_dead_letter_topic=False)
UNFAIR = share_settings({}, is_dead_letter_topic=False)
STORED = LoadedState(0, 0, 0, 0, 0, 0, (), (), (), None, True, 0)


class Log:
    """Batches of records with these keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = list(keys)

    def batches(self, offset: int) -> Iterator[bytes]:
        first = offset // BATCH_RECORDS * BATCH_RECORDS
        while first < len(self.keys):
            part = self.keys[first : first + BATCH_RECORDS]
            yield build_batch([(0, key.encode(), b"", ()) for key in part], base_offset=first)
            first += BATCH_RECORDS


class Machine:
    """Stands for the state machine of a share partition, which has delivered all below its end."""

    def __init__(self) -> None:
        self.ranges = SimpleNamespace(end=0)
        self.has_records = False
        self.settings = FAIR
        self.undone: list[tuple[int, int]] = []

    @property
    def passed_end(self) -> int:
        return self.ranges.end

    @property
    def undelivered_from(self) -> int:
        return self.ranges.end

    def undone_ranges(self) -> list[tuple[int, int]]:
        return self.undone

    def pass_others(self, readable_end: int) -> None:
        """Nothing: the test sets the ends."""

    def set_isolations(self, isolations: object) -> object:
        return isolations


class Leader:
    """Stands for the leader of a share partition; its writes are stored by `store_all`."""

    def __init__(self, log: Log, number: int = BASE) -> None:
        self.partition = SimpleNamespace(log=log, report_damage=lambda *_: None)
        self.key = SimpleNamespace(number=number)
        self.end_error: Exception | None = None
        self.is_ready, self.has_writes = True, False
        self.writes: list[Callable[[Any], None]] = []
        self.resets: list[tuple[int, int]] = []
        self.state_machine = Machine()

    def group_end(self) -> int:
        return len(self.partition.log.keys)

    def call_machine(self, method: Callable[..., Any], *args: Any) -> Any:
        return method(*args)

    def store(self, updates: Sequence[Any], on_stored: Callable[[Any], None]) -> None:
        self.writes.append(on_stored)

    def persist_in_background(self, update: object) -> None:
        pass

    async def reset_state_of(self, number: int, start: int) -> None:
        self.resets.append((number, start))

    def store_all(self) -> None:
        writes, self.writes = self.writes, []
        for each in writes:
            each(None)

    def wake(self) -> None:
        pass

    def end(self, error: Exception) -> None:
        self.end_error = error


class Scene:
    """The scan of one topic partition."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.simulation = Simulation(1)
        self.log = Log(keys)
        self.base = Leader(self.log)
        self.queues_changed = 0
        self.index = FairIndex(0, (), 0, "")
        self.scan = FairScan(
            cast("FairLeader", self.base), self.index, self.simulation.scheduler(), self._on_queues_changed
        )

    def _on_queues_changed(self) -> None:
        self.queues_changed += 1

    def read(self) -> None:
        """Read the whole log, with all isolations stored at once."""
        self.scan.advance(len(self.log.keys))
        while self.index.end < len(self.log.keys):
            self.base.store_all()
            self.simulation.run_for(10)

    def attach(self, number: int = QUEUE) -> Leader:
        queue = Leader(self.log, number)
        self.scan.attach(cast("FairLeader", queue))
        return queue

    def review(self) -> None:
        self.simulation.run_for(fair_scan.REVIEW_INTERVAL_MS + 1)
        self.base.store_all()


def test_nothing_behind_an_isolation_is_offered_before_it_is_stored() -> None:
    scene = Scene(["noisy"] * 300)
    scene.scan.advance(300)
    for _ in range(3):
        scene.simulation.run_for(100)
        scene.scan.advance(300)
        assert scene.index.end == BACKLOG_MAX
        assert scene.index.isolations == ()
        assert len(scene.base.writes) == 1, "one change at a time"
    scene.base.store_all()
    assert scene.index.isolations == (Isolation(QUEUE, BACKLOG_MAX, OPEN_END, "", b"noisy"),)
    assert scene.queues_changed == 1
    scene.simulation.run_for(100)
    assert scene.index.end == 300


def test_a_backlog_queue_is_in_use_until_its_records_are_done() -> None:
    scene = Scene(["noisy"] * 300)
    scene.read()
    queue = scene.attach()
    scene.review()
    assert scene.index.isolated_count == 1, "its records are not delivered"
    queue.state_machine.ranges.end = 300
    scene.review()
    assert scene.index.isolated_count == 0
    queue.state_machine.has_records = True
    scene.review()
    assert scene.index.numbers == (BASE, QUEUE), "a record is not done"
    queue.state_machine.has_records, queue.has_writes = False, True
    scene.review()
    assert scene.index.numbers == (BASE, QUEUE), "its last update is not stored"
    queue.has_writes = False
    scene.review()
    assert QUEUE not in scene.index.numbers


def test_numbers_are_kept_down_to_the_lowest_record_that_is_not_delivered() -> None:
    scene = Scene(["noisy"] * 300)
    scene.read()
    queue = scene.attach()
    scene.base.state_machine.ranges.end, queue.state_machine.ranges.end = 64, 200
    scene.review()
    assert scene.index.start == 64
    scene.base.state_machine.ranges.end = 300
    queue.state_machine.undone = [(70, 72), (199, 199)]
    scene.review()
    assert scene.index.start == 200
    assert [*scene.index.ranges(QUEUE, 0, 299)] == [(70, 72), (199, 199), (200, 299)], "or not done"
    assert next(scene.index.ranges(BASE, 0, 299)) == (0, 199)
    assert [tuple(each) for each in scene.index.split(71, 73)] == [(71, 72, QUEUE), (73, 73, BASE)]
    assert [scene.index.count(number, 0, 299) for number in (BASE, QUEUE)] == [200, 104]


def test_a_backlog_queue_begins_without_a_state_of_another_time() -> None:
    scene = Scene(["noisy"] * 300)
    scene.read()
    assert scene.base.resets == [(QUEUE, BACKLOG_MAX)]
    queue = scene.attach()
    queue.state_machine.ranges.end = scene.base.state_machine.ranges.end = 300
    scene.review()
    scene.log.keys += ["noisy"] * 200
    scene.read()
    assert scene.index.isolated_count == 1
    assert len(scene.base.resets) == 1, "its state is needed"


def test_a_group_with_fairness_needs_no_numbers_after_its_backlogs() -> None:
    scene = Scene(["noisy"] * 300)
    scene.read()
    queue = scene.attach()
    queue.state_machine.ranges.end = 300
    scene.review()
    scene.review()
    assert scene.index.numbers == (BASE,)
    assert not scene.index.offsets_of(BASE).has_all, "`BASE` has not passed the backlog"
    scene.base.state_machine.ranges.end = 300
    scene.review()
    assert scene.index.offsets_of(BASE).has_all


def test_a_reader_that_was_turned_off_meanwhile_closes_what_was_being_opened() -> None:
    scene = Scene(["noisy"] * 300)
    scene.scan.advance(300)
    scene.base.state_machine.settings = UNFAIR
    scene.scan.reconfigure(UNFAIR)
    scene.simulation.run_for(1)
    assert len(scene.base.writes) == 1
    scene.read()
    assert scene.index.isolated_count == 0
    assert not scene.index.is_active
    assert [*scene.index.ranges(QUEUE, 0, 299)] == []


def test_many_records_of_a_batch_that_ends_in_a_backlog_queue_do_not_stop_the_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fair_scan, "SCAN_AHEAD_RECORDS", 20)
    monkeypatch.setattr(fair_index, "BACKLOG_MAX", 5)
    quiet = [f"quiet-{number}" for number in range(BATCH_RECORDS - 20)]
    scene = Scene(["noisy"] * 10 + quiet + ["noisy"] * (10 + BATCH_RECORDS))
    end = len(scene.log.keys)
    for _ in range(10):
        scene.scan.advance(end)
        scene.base.store_all()
        scene.simulation.run_for(10)
        in_base = [*scene.index.ranges(BASE, 0, scene.index.end - 1)]
        scene.base.state_machine.ranges.end = in_base[-1][1] + 1  # what is offered of `BASE` is delivered
    assert scene.index.end == end


def test_all_states_decide_which_numbers_follow_from_the_isolations() -> None:
    isolations = (Isolation(QUEUE, 64, OPEN_END, "", b"noisy"),)
    base = STORED._replace(
        start_offset=64, changes=(StateBatch(64, 80, 1, 1, holder="m"),), isolations=isolations
    )
    queue = STORED._replace(start_offset=70, changes=(StateBatch(70, 199, 2, 1), StateBatch(200, 250, 1, 1)))
    index = load_index(base, {QUEUE: queue}, FAIR, log_start=0, log_end=400)
    assert (index.start, index.decided_end) == (80, 251), "all before was delivered, and passed by `BASE`"
    delivered = queue._replace(start_offset=66, changes=())
    assert load_index(base, {QUEUE: delivered}, FAIR, log_start=0, log_end=400).start == 65
    lost = queue._replace(is_complete=False, lease_bound=350)
    assert load_index(base, {QUEUE: lost}, FAIR, log_start=0, log_end=400).decided_end == 350
    assert load_index(base, {QUEUE: lost}, FAIR, log_start=0, log_end=300).decided_end == 300
    dead = queue._replace(dead_ranges=(DeadRange(10, 10, 1, 0),))
    assert undone_ranges_of(dead) == [(10, 10), (200, 250)]
    done = base._replace(start_offset=300, changes=())
    assert load_index(done, {}, FAIR, log_start=0, log_end=400).start == 64, "a queue that was never stored"
    idle = base._replace(start_offset=3, changes=())
    assert load_index(idle, {}, FAIR, log_start=0, log_end=400).decided_end == 64, "where the queue begins"
    closed = base._replace(isolations=(isolations[0]._replace(end=390),))
    assert load_index(closed, {QUEUE: queue}, FAIR, log_start=0, log_end=400).decided_end == 390


def test_an_index_that_is_read_again_has_the_same_numbers() -> None:
    chance = Simulation(7).random
    scene = Scene([chance.choice(["noisy", "loud", f"quiet-{chance.randrange(50)}"]) for _ in range(1_000)])
    scene.read()
    for number in scene.index.numbers[1:]:
        scene.attach(number).state_machine.ranges.end = 1_000
    for is_closed in (False, True):
        if is_closed:
            scene.review()
            assert not scene.index.has_open_isolation
        index = read_again(scene.log, scene.index.isolations, 1_000)
        assert index.split(0, 999) == scene.index.split(0, 999)


def test_what_was_decided_without_an_isolation_stays_so() -> None:
    """For example while there were too many isolations."""
    log = Log(["loud", "noisy"] * 300)
    index = read_again(log, (Isolation(QUEUE, 0, OPEN_END, "", b"loud"),), 500)
    assert [each.number for each in index.split(0, 499)] == [QUEUE, BASE] * 250


def read_again(log: Log, isolations: tuple[Isolation, ...], decided_end: int) -> FairIndex:
    """The index of a leader that finds these isolations, and leases up to some offset."""
    state = STORED._replace(isolations=isolations, changes=(StateBatch(0, decided_end - 1, 2, 1),))
    index = load_index(state, {}, FAIR, log_start=0, log_end=len(log.keys))
    simulation = Simulation(1)
    scan = FairScan(cast("FairLeader", Leader(log)), index, simulation.scheduler(), lambda: None)
    simulation.run(scan.load(0))
    assert index.end == decided_end
    return index


def test_records_of_a_backlog_queue_are_known_whatever_can_be_read_now() -> None:
    index = FairIndex(0, (), 0, "")
    index.append(100, [NumberedRange(10, 19, QUEUE)])
    all_done = STORED._replace(start_offset=20)
    states = {
        "some are open": (STORED._replace(start_offset=15), True),
        "all are done": (all_done, False),
        "one is leased": (
            STORED._replace(start_offset=19, changes=(StateBatch(19, 19, 1, 1, holder="m"),)),
            True,
        ),
        "one is dead": (all_done._replace(dead_ranges=(DeadRange(12, 12, 1, 0),)), True),
    }
    for name, (state, expected) in states.items():
        machine = SharePartition(
            ShareKey("g", bytes(16), 0, QUEUE),
            FAIR,
            state,
            leader_epoch=0,
            log_start=0,
            log_end=100,
            high_watermark=0,  # as long as a new leader does not know it
            now_ms=0,
            wall_ms=0,
            own=index.offsets_of(QUEUE),
        )
        assert machine.has_records is expected, name


def test_what_base_has_not_passed_after_a_loss_is_passed_before_its_numbers_are_forgotten() -> None:
    """A leader that goes on after an update was lost finds passed offsets of a backlog queue AVAILABLE in `BASE`."""
    index = FairIndex(0, (), 0, "")
    index.append(100, [NumberedRange(10, 19, QUEUE)])
    state = STORED._replace(
        start_offset=5,
        changes=(StateBatch(5, 9, 1, 1, holder="m"), StateBatch(10, 29, 0, 1), StateBatch(30, 39, 1, 1)),
    )
    machine = SharePartition(
        ShareKey("g", bytes(16), 0),
        FAIR,
        state,
        leader_epoch=0,
        log_start=0,
        log_end=100,
        high_watermark=100,
        now_ms=0,
        wall_ms=0,
        own=index.offsets_of(BASE),
    )
    assert machine.passed_end == 10
    update = present(machine.pass_others(100))
    assert [(each.first, each.last, each.state) for each in update.changes] == [(10, 19, 2)]
    assert machine.passed_end == 10, "it is not stored"
    machine.mark_persisted(update.token)
    assert machine.passed_end == machine.ranges.end == 40
    assert machine.pass_others(100) is None


def test_offsets_that_are_not_committed_are_not_passed() -> None:
    """A new leader may have other records there."""
    index = FairIndex(0, (), 0, "")
    index.append(100, [NumberedRange(10, 99, QUEUE)])
    machine = SharePartition(
        ShareKey("g", bytes(16), 0),
        FAIR,
        STORED._replace(start_offset=10),
        leader_epoch=0,
        log_start=0,
        log_end=100,
        high_watermark=60,
        now_ms=0,
        wall_ms=0,
        own=index.offsets_of(BASE),
    )
    update = present(machine.pass_others(60))
    assert [(each.first, each.last) for each in update.changes] == [(10, 59)]
