"""The state of share groups on one broker: what survives what, who may write, and how the log is kept short."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from mansio.broker.coordinator.share import state_store
from mansio.broker.coordinator.share.state_store import WriteToken
from mansio.broker.routing.routes import partition_for, share_partition_key
from mansio.errors import (
    CoordinatorNotAvailable,
    FencedLeaderEpoch,
    FencedStateEpoch,
    MansioError,
    NotCoordinator,
    StorageError,
)
from mansio.state.share_partition.snapshot import fold
from mansio.state.share_partition.state_records import UPDATE, decode_value, encode_key, encode_update
from mansio.state.share_partition.types import (
    ACKNOWLEDGED,
    ACQUIRED,
    OPEN_END,
    Isolation,
    LoadedState,
    ShareKey,
    StateBatch,
    Update,
)
from mansio.wire.batch.record_batch import build_batch
from support.share_state_fixtures import LOCK_MS, StateRoom, begun, key_of, leased
from support.tiers import examples

G = key_of()
PLAIN = ("snapshot_epoch", "leader_epoch", "is_complete", "withheld_ms")


def plain(state: LoadedState | None) -> Any:
    """What a state has of the share partition."""
    assert state is not None
    return state._replace(snapshot_epoch=0, leader_epoch=0, is_complete=True, withheld_ms=0)


def acked(first: int, last: int, **more: Any) -> Update:
    return leased(first, last, durable=True)._replace(
        changes=(StateBatch(first, last, ACKNOWLEDGED, 1),), **more
    )


# What survives


def test_the_topic_is_made_by_the_first_write_and_by_nothing_else() -> None:
    room = StateRoom()
    assert room.read(G) is None
    assert room.run(room.persister.summary(G)) is None
    room.run(room.persister.delete(G))
    assert not room.partitions
    assert not room.disk.exists("data/boot")
    room.write(G, begun())
    assert len(room.partitions) == 2
    assert plain(room.read(G)).lease_bound == 100


def test_progress_of_a_share_partition_is_known_without_its_leader() -> None:
    room = StateRoom()
    room.begin(G)
    room.write(G, acked(0, 9))
    assert [*room.store.stored_offsets()] == [(G, 0)]
    assert room.store.first_undone_offset(G) == 10
    assert room.store.first_undone_offset(G._replace(group="none")) == 0


def test_a_process_that_is_killed_leaves_all_that_was_appended() -> None:
    room = StateRoom()
    room.begin(G)
    room.write(G, leased(0, 9))
    room.write(G, leased(10, 19))
    reported = room.store._shares[G].folded.changes
    again = room.kill()
    state = again.read(G)
    assert state.changes == reported == (StateBatch(0, 19, ACQUIRED, 1, holder="m"),)
    assert (state.is_complete, state.withheld_ms) == (True, 0)


@pytest.mark.parametrize("seed", range(examples(8, 25)))
def test_after_a_power_loss_what_was_durable_is_there_and_the_rest_is_a_history_that_was(seed: int) -> None:
    """Writes of two share partitions, with snapshots in between and the log pruned; the power fails at any moment."""
    rng = Random(seed)
    room = StateRoom(segment_bytes=2000, updates_per_snapshot=4)
    keys = [key_of("g"), key_of("h")]
    histories: dict[ShareKey, list[LoadedState]] = {}
    durable: dict[ShareKey, int] = {}
    for key in keys:
        room.begin(key)
        histories[key], durable[key] = [plain(room.read(key))], 0
    for number in range(rng.randint(1, 60)):
        key = rng.choice(keys)
        first = rng.randint(0, 50)
        update = (acked if rng.random() < 0.4 else leased)(first, first + rng.randint(0, 5))
        update = update._replace(start_offset=number // 6)
        histories[key].append(fold(histories[key][-1], update))
        room.write(key, update)
        if update.durable:
            durable[key] = len(histories[key]) - 1
        if rng.random() < 0.1:
            room.run(room.state.prune())
        if rng.random() < 0.2:
            room.simulation.run_for(rng.randint(0, 150))
    again = room.lose_power(rng)
    for key in keys:
        state = again.read(key, 1)
        assert not state.is_complete
        assert state.withheld_ms == LOCK_MS
        assert plain(state) in histories[key][durable[key] :]


def test_an_update_of_an_older_snapshot_changes_nothing() -> None:
    room = StateRoom()
    room.begin(G)
    room.write(G, acked(0, 9))
    epoch = room.store._shares[G].snapshot_epoch
    room.write(G, begun(start=10))
    late = encode_update(epoch, 0, leased(12, 13, durable=True))
    index = room.store.partition_for(G)
    room.run(_append(room, index, [(encode_key(UPDATE, G), late)]))
    assert room.read(G).changes == ()
    assert room.kill().read(G).changes == ()


async def _append(room: StateRoom, index: int, records: list[tuple[bytes, bytes | None]]) -> None:
    await room.state.topic.append(index, records)


def test_a_damaged_record_keeps_its_partition_from_being_used_and_is_not_skipped() -> None:
    room = StateRoom()
    room.begin(G)
    broken = room.partition_of(G)
    broken.append(build_batch([(0, encode_key(UPDATE, G), b"\x00\x00nonsense", ())]), internal=True)
    again = room.kill()
    with pytest.raises(CoordinatorNotAvailable, match="could not be loaded"):
        again.read(G)


def test_a_large_state_survives_as_a_whole() -> None:
    room = StateRoom()
    changes = tuple(StateBatch(2 * n, 2 * n, ACQUIRED, 1, holder=f"m{n}") for n in range(5001))
    room.begin(G, update=begun()._replace(changes=changes))
    assert room.kill().read(G).changes == changes


# Who may write


def test_an_older_leader_neither_reads_nor_writes() -> None:
    room = StateRoom()
    room.begin(G, leader_epoch=4)
    assert room.read(G, 6).leader_epoch == 6
    with pytest.raises(FencedLeaderEpoch):
        room.read(G, 5)
    with pytest.raises(FencedLeaderEpoch):
        room.write(G, leased(0, 1), leader_epoch=5)
    room.read(G, 6)
    outcomes: list[MansioError | None] = []
    room.persister.begin_write(G, 0, 5, leased(0, 1), outcomes.append)
    room.simulation.run_for(100)
    assert [type(each) for each in outcomes] == [FencedLeaderEpoch], "its state is not to be kept"


def test_the_leader_epoch_of_a_read_is_durable_when_it_is_answered() -> None:
    room = StateRoom()
    room.begin(G, leader_epoch=4)
    room.read(G, 6)
    for seed in range(10):
        after = StateRoom(room.disk.crash(Random(seed)), boot="second")
        with pytest.raises(FencedLeaderEpoch):
            after.read(G, 5)


def test_an_older_state_epoch_is_fenced_and_a_new_state_is_empty() -> None:
    room = StateRoom()
    room.begin(G)
    room.write(G, acked(0, 3))
    room.run(room.persister.initialize(G, 1, 7))
    with pytest.raises(FencedStateEpoch):
        room.write(G, leased(8, 9))
    with pytest.raises(FencedStateEpoch):
        room.run(room.persister.initialize(G, 0, 3))
    room.read(G, 1)
    room.write(G, leased(8, 9), state_epoch=1, leader_epoch=1)
    state = room.lose_power(Random(0)).read(G, 1)
    assert (state.state_epoch, state.start_offset) == (1, 7)
    assert not [change for change in state.changes if change.state == ACKNOWLEDGED]


def test_a_state_that_is_begun_again_in_its_own_epoch_is_left_as_it_is() -> None:
    """The request came twice, the second time late."""
    room = StateRoom()
    room.run(room.persister.initialize(G, 1, 7))
    room.read(G)
    room.write(G, acked(8, 9), state_epoch=1)
    room.run(room.persister.initialize(G, 1, 7))
    assert room.read(G).changes == (StateBatch(8, 9, ACKNOWLEDGED, 1),)


def test_a_client_that_did_not_read_last_does_not_write() -> None:
    room = StateRoom()
    room.begin(G)
    first = room.persister._read_sessions[G]
    state, session = room.run(room.store.read(G, 0))
    assert state is not None
    assert session != first.session
    with pytest.raises(NotCoordinator, match="has to be read"):
        room.write(G, leased(0, 1))
    with pytest.raises(NotCoordinator):
        room.write(G, leased(0, 1))
    room.read(G)
    room.write(G, leased(0, 1))


def test_a_write_that_comes_late_or_again_is_refused() -> None:
    room = StateRoom()
    room.begin(G)
    _, session = room.run(room.store.read(G, 0))
    write = room.store.write
    write(G, WriteToken(session, 2), 0, 0, leased(0, 1))
    write(G, WriteToken(session, 1), 0, 0, acked(5, 6))  # the way of those that wait has an order of its own
    for number, update in ((2, leased(0, 1)), (1, leased(2, 3)), (1, acked(5, 6))):
        with pytest.raises(NotCoordinator, match="is late or repeated"):
            write(G, WriteToken(session, number), 0, 0, update)
    write(G, WriteToken(session, 3), 0, 0, leased(2, 3))


def test_a_state_that_was_created_is_not_created_again_by_a_repeated_request() -> None:
    room = StateRoom()
    room.begin(G)
    session = room.persister._read_sessions[G].session
    room.write(G, leased(0, 1))
    with pytest.raises(NotCoordinator, match="is late or repeated"):
        room.store.write(G, WriteToken(session, 1), 0, 0, begun())
    assert room.read(G).changes == leased(0, 1).changes


def test_the_summary_names_backlog_queues_that_may_have_a_state() -> None:
    room = StateRoom()
    room.begin(G)
    isolations = (Isolation(17, 5, 9, "", b"done"), Isolation(16, 7, OPEN_END, "", b"noisy"))
    room.write(G, leased(0, 1, durable=True)._replace(isolations=isolations))
    for one in (room, room.lose_power()):
        summary = one.run(one.persister.summary(G))
        assert summary.queues == (16, 17)


def test_what_does_not_exist_cannot_be_changed_and_what_was_deleted_does_not_come_back() -> None:
    room = StateRoom()
    room.begin(G)
    other = key_of("other")
    assert room.read(other) is None
    with pytest.raises(FencedStateEpoch):
        room.write(other, leased(0, 1))
    _, session = room.run(room.store.read(G, 0))
    room.run(room.persister.delete(G))
    with pytest.raises(FencedStateEpoch):
        room.store.write(G, WriteToken(session, 1), 0, 0, leased(0, 1))
    with pytest.raises(NotCoordinator):
        room.store.write(G, WriteToken(session, 2), 0, 0, begun())
    again = room.lose_power()
    assert again.read(G) is None
    again.begin(G)


def test_a_state_that_was_reported_missing_is_not_made_over_one_that_is_there() -> None:
    room = StateRoom()
    assert room.read(G) is None  # the topic is not there yet
    room.run(room.persister.initialize(G, 0, 5))
    read_session = room.persister._read_sessions[G]
    read_session.session = 0
    with pytest.raises(FencedStateEpoch, match="after all"):
        room.write(G, begun())
    assert room.read(G).start_offset == 5


def test_a_failed_write_ends_the_reading_and_the_whole_state_opens_a_new_one() -> None:
    room = StateRoom()
    room.begin(G)
    failing = _Failing(room.partition_of(G))
    with pytest.raises(NotCoordinator):
        room.write(G, leased(0, 1))
    failing.end()
    with pytest.raises(NotCoordinator, match="has to be read"):
        room.write(G, leased(0, 1))
    room.write(G, begun(start=3))
    room.write(G, leased(3, 4))
    assert room.read(G).start_offset == 3


class _Failing:
    """Appends to a partition raise."""

    def __init__(self, partition: Any) -> None:
        self._append = partition.log.append
        self._log = partition.log
        partition.log.append = self._raise

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise StorageError("no room")

    def end(self) -> None:
        self._log.append = self._append


def test_there_is_a_bound_of_states() -> None:
    room = StateRoom(share_partitions_max=2)
    room.begin(key_of("a"))
    room.begin(key_of("b"))
    with pytest.raises(CoordinatorNotAvailable):
        room.begin(key_of("c"))
    room.run(room.persister.delete(key_of("a")))
    room.write(key_of("c"), begun())


# What may be missing


def test_after_another_start_of_the_machine_first_leases_may_be_missing_for_as_long_as_they_last() -> None:
    room = StateRoom()
    room.begin(G)
    again = room.kill(boot="second")
    assert (again.read(G).is_complete, again.read(G).withheld_ms) == (False, LOCK_MS)
    again.simulation.run_for(LOCK_MS - 1000)
    assert 900 < again.read(G).withheld_ms <= 1001
    again.write(G, leased(0, 1, durable=True))
    assert not again.read(G).is_complete, "what is withheld is not over yet"
    again.simulation.run_for(1100)
    assert (again.read(G).is_complete, again.read(G).withheld_ms) == (False, 0)
    again.write(G, leased(2, 3))
    assert not again.read(G).is_complete, "nothing durable says so yet"
    again.write(G, leased(2, 3, durable=True))
    assert again.read(G).is_complete


def test_a_leader_that_lived_through_it_reports_what_there_is() -> None:
    room = StateRoom()
    room.begin(G)
    again = room.kill(boot="second")
    again.read(G)
    again.write(G, begun())
    assert again.read(G).is_complete


def test_a_second_end_within_that_time_leaves_it_as_uncertain() -> None:
    room = StateRoom()
    room.begin(G)
    second = room.kill(boot="second")
    second.simulation.run_for(LOCK_MS - 1000)
    third = second.kill()
    assert third.read(G).withheld_ms == LOCK_MS
    third.simulation.run_for(LOCK_MS + 1000)
    assert third.kill().read(G).is_complete


def test_where_the_start_of_the_machine_is_unknown_nothing_is_certain() -> None:
    room = StateRoom(boot="")
    room.begin(G)
    assert not room.kill(boot="").read(G).is_complete


def test_a_log_that_lost_its_end_at_the_start_makes_its_states_uncertain() -> None:
    room = StateRoom()
    room.begin(G)
    room.write(G, leased(0, 1, durable=True))
    index = room.store.partition_for(G)
    name = f"data/s-{index}/00000000000000000000.log"
    disk = room.disk
    torn = disk.open(name)
    torn.write_at([b"\x00\x00\x00\x00torn"], room.partitions[index].log._active.size)
    assert not room.kill().read(G).is_complete


# Keeping the log short


def segments(room: StateRoom, index: int) -> list[str]:
    return [name for name in room.disk.list_directory(f"data/s-{index}") if name.endswith(".log")]


def test_a_state_is_written_as_a_whole_after_so_many_updates() -> None:
    room = StateRoom(updates_per_snapshot=5)
    room.begin(G)
    share = room.store._shares[G]
    for number in range(12):
        room.write(G, leased(number, number))
    assert (share.snapshot_epoch, share.update_count) == (2, 2)
    assert room.kill().read(G).changes == (StateBatch(0, 11, ACQUIRED, 1, holder="m"),)


@pytest.mark.parametrize(
    ("bytes_max", "taken_in"), [(state_store.DEFERRED_BYTES_MAX, 2 * (1 + 2)), (0, 2 * (3 + 12))]
)
def test_a_load_takes_in_the_last_snapshot_and_what_comes_after_it_and_puts_off_no_more_than_it_may(
    monkeypatch: pytest.MonkeyPatch, bytes_max: int, taken_in: int
) -> None:
    room = StateRoom(updates_per_snapshot=5)
    keys = (G, next(key for n in range(100) if room_index(key := key_of(f"other{n}")) == room_index(G)))
    for key in keys:
        room.begin(key)
    for number in range(12):
        for key in keys:
            room.write(key, leased(number, number), leader_epoch=number)
    reported = {key: (share.folded.changes, share.leader_epoch) for key, share in room.store._shares.items()}
    decoded: list[int] = []
    monkeypatch.setattr(
        state_store, "decode_value", lambda kind, value: (decoded.append(kind), decode_value(kind, value))[1]
    )
    monkeypatch.setattr(state_store, "DEFERRED_BYTES_MAX", bytes_max)
    again = room.kill()
    assert len(decoded) == taken_in
    assert {
        key: (each.folded.changes, each.leader_epoch) for key, each in again.store._shares.items()
    } == reported


def test_segments_that_no_state_needs_leave_the_disk_and_the_next_start_reads_little() -> None:
    room = StateRoom(segment_bytes=4000, updates_per_snapshot=10)
    room.begin(G)
    index = room.store.partition_for(G)
    for number in range(400):
        room.write(G, leased(number, number, durable=number % 20 == 0))
    before = segments(room, index)
    room.run(room.state.prune())
    room.simulation.run_for(2000)
    assert len(segments(room, index)) < len(before) / 4
    partition = room.partitions[index]
    assert 0 < partition.log.start_offset <= room.store._shares[G].snapshot_offset
    reported = room.read(G).changes
    for life in (room.lose_power(Random(3)), room.kill()):
        assert life.read(G, 1).changes == reported


def test_nothing_above_the_oldest_snapshot_that_counts_is_pruned() -> None:
    """A state that is not changed keeps the log, until it is written again; then that is durable before."""
    room = StateRoom(segment_bytes=4000, updates_per_snapshot=10)
    cold = next(key for n in range(100) if room_index(key := key_of(f"cold{n}")) == room_index(G))
    room.begin(cold, update=begun()._replace(changes=(StateBatch(3, 9, ACKNOWLEDGED, 2),)))
    room.begin(G)
    index = room.store.partition_for(G)
    for number in range(60):  # some segments, fewer than are too many
        room.write(G, leased(number, number))
    offset = room.store._shares[cold].snapshot_offset
    room.run(room.state.prune())
    assert room.store._shares[cold].snapshot_offset == offset
    assert room.partitions[index].log.start_offset <= offset
    room.simulation.run_for(300_000)
    room.run(room.state.prune())
    assert room.store._shares[cold].snapshot_offset > offset
    assert room.partitions[index].log.start_offset > offset
    for seed in range(10):
        after = StateRoom(room.disk.crash(Random(seed)), boot="second", **room.options)
        assert after.read(cold, 1).changes == (StateBatch(3, 9, ACKNOWLEDGED, 2),)


def test_a_state_that_keeps_too_many_segments_is_written_again_at_once() -> None:
    room = StateRoom(segment_bytes=2000, updates_per_snapshot=10)
    cold = next(key for n in range(100) if room_index(key := key_of(f"cold{n}")) == room_index(G))
    room.begin(cold)
    room.begin(G)
    for number in range(300):
        room.write(G, leased(number, number))
    assert len(segments(room, room.store.partition_for(G))) > 10
    room.run(room.state.prune())
    room.simulation.run_for(2000)
    assert len(segments(room, room.store.partition_for(G))) < 10


def room_index(key: ShareKey) -> int:
    return partition_for(share_partition_key(key), 2)


def test_the_log_of_states_that_are_all_gone_is_let_go() -> None:
    room = StateRoom(segment_bytes=2000)
    room.begin(G)
    for number in range(100):
        room.write(G, leased(number, number))
    room.run(room.persister.delete(G))
    room.run(room.state.prune())
    room.simulation.run_for(2000)
    assert len(segments(room, room.store.partition_for(G))) == 1
    assert room.kill().read(G) is None


def test_a_snapshot_that_finds_no_room_costs_no_write() -> None:
    room = StateRoom(updates_per_snapshot=3)
    room.begin(G)
    log = room.partition_of(G).log
    append, sizes = log.append, []

    def full_for_snapshots(batch: Any, *rest: Any, **more: Any) -> Any:
        sizes.append(len(batch))
        if len(sizes) == 4:
            raise StorageError("no room")
        return append(batch, *rest, **more)

    log.append = full_for_snapshots
    for number in range(5):
        room.write(G, leased(number, number))
    assert len(sizes) == 7, "three updates, no snapshot, an update and the snapshot, one more"
    assert room.kill().read(G).changes == (StateBatch(0, 4, ACQUIRED, 1, holder="m"),)


def test_errors_of_the_topic_are_those_a_leader_can_act_on() -> None:
    room = StateRoom()
    room.begin(G)
    failing = _Failing(room.partition_of(G))
    with pytest.raises(MansioError) as caught:
        room.run(room.persister.initialize(G, 5, 0))
    assert isinstance(caught.value, NotCoordinator | CoordinatorNotAvailable)
    failing.end()
    assert room.read(G).state_epoch == 0
