"""Replicas of one partition on virtual time: an acknowledged record is on all in-sync replicas, whatever fails."""

from __future__ import annotations

import dataclasses
import errno
from typing import TYPE_CHECKING, Any

import pytest
from bench.many_partitions import CallCounter

from mansio.broker.replication.replica_fetcher import ReplicaFetcherSettings
from mansio.errors import (
    FencedLeaderEpoch,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
    OffsetNotAvailable,
    StaleBrokerEpoch,
)
from mansio.host.item_turns import ItemTurns, Work
from mansio.metadata.metadata_store import AmbiguousOutcome
from mansio.state.broker_handshake import BrokerIdentity
from mansio.state.replica import ReplicationProgress
from mansio.storage.group_commit import GroupCommit
from mansio.storage.log import Log
from mansio.testing.disk import SimulatedDisk
from mansio.wire.apis.fetch import decode_request, decode_response
from mansio.wire.headers import read_request_header
from support.replicas import KEYS, LAG_MS_MAX, TOPIC, Cluster, Node

if TYPE_CHECKING:
    from mansio.storage.flush_state import FlushJob
    from support.replicas import Ack


def running(**options: object) -> Cluster:
    """Three brokers that know each other; 1 leads."""
    cluster = Cluster(**options)  # type: ignore[arg-type]
    cluster.run_for(1000)
    return cluster


def committed(cluster: Cluster, *values: bytes, leader: int = 1) -> Ack:
    ack = cluster[leader].append(*values)
    cluster.run_until(lambda: ack.settled, 10_000)
    assert ack.acknowledged, ack.error
    return ack


def lose_contact(cluster: Cluster, node_id: int) -> None:
    """The broker dies for the others and for the store: its session ends, and it hears of nothing."""
    cluster.network.isolate(node_id)
    cluster[node_id].store.store_client.unreachable = True
    cluster.end_session(node_id)


def test_what_is_acknowledged_is_durable_on_every_replica() -> None:
    cluster = running()
    ack = cluster[1].append(b"a", b"b")
    assert not ack.settled
    cluster.run_until(lambda: ack.settled, 2000)
    assert ack.acknowledged
    for node_id in (1, 2, 3):
        assert cluster[node_id].log.durable_end_offset == 2
        assert cluster[node_id].values() == [b"a", b"b"]
    cluster.run_until(cluster.settled, 2000)
    cluster.check_same()


def test_no_ack_before_every_in_sync_replica_has_it() -> None:
    cluster = running()
    cluster.network.isolate(3)
    ack = cluster[1].append(b"a")
    cluster.run_for(LAG_MS_MAX / 2)
    assert cluster[2].log.durable_end_offset == 1
    assert not ack.settled
    assert cluster[1].values(committed=True) == [], "nobody reads what one replica in sync does not have"
    cluster.network.cut.clear()
    cluster.run_until(lambda: ack.acknowledged, 12_000)


def test_what_was_acknowledged_survives_the_power_loss_of_all_brokers() -> None:
    cluster = running()
    acks = [committed(cluster, b"%d" % number) for number in range(5)]
    for node_id in (1, 2, 3):
        cluster.kill(node_id, power=True)
    for node_id in (1, 2, 3):
        cluster.restart(node_id)
    cluster.elect(2)
    cluster.tell()
    cluster.run_until(lambda: cluster[2].partition.high_watermark == 5)
    assert cluster[2].values() == [value for ack in acks for value in ack.values]


def test_a_follower_that_has_it_but_has_not_synced_it_does_not_count() -> None:
    cluster = running()
    disk = cluster[3].background
    disk._latency_ms = lambda: 1000.0  # the sync takes that long
    ack = cluster[1].append(b"a")
    cluster.run_until(lambda: cluster[3].log.end_offset == 1, 500)
    cluster.run_for(500)
    assert cluster[3].log.durable_end_offset == 0
    assert not ack.settled
    cluster.run_until(lambda: ack.acknowledged, 3000)
    assert cluster[3].log.durable_end_offset == 1


def test_a_leader_counts_only_what_it_has_synced_itself() -> None:
    cluster = running()
    cluster[2].background._latency_ms = lambda: 2000.0
    cluster[1].append(b"a")
    cluster.run_until(lambda: cluster[2].log.end_offset == 1 and cluster[3].log.durable_end_offset == 1, 500)
    lose_contact(cluster, 1)
    cluster.elect(2, isr=(2, 3))
    cluster.tell(2, 3)
    cluster.run_for(1000)
    assert cluster[2].log.durable_end_offset == 0
    assert cluster[2].partition.high_watermark == 0
    cluster.run_until(lambda: cluster[2].partition.high_watermark == 1, 5000)
    assert cluster[2].log.durable_end_offset == 1


def test_a_follower_does_not_cut_its_log_at_its_high_watermark() -> None:
    """KIP-101: the follower had everything, but did not know yet that it is committed, when it was restarted."""
    cluster = running()
    ack = committed(cluster, b"a")
    cluster.kill(2, power=True)
    cluster.restart(2)
    lose_contact(cluster, 1)
    cluster.elect(2, isr=(2, 3))
    cluster.tell(2, 3)
    cluster.run_for(2000)
    assert cluster[2].values() == ack.values
    committed(cluster, b"b", leader=2)
    assert cluster[3].values() == [b"a", b"b"]


def test_a_follower_with_another_epoch_is_not_counted() -> None:
    cluster = running()
    committed(cluster, b"a")
    cluster.elect(1)
    cluster.tell(1)  # the followers do not know
    cluster.run_for(10)
    ack = cluster[1].append(b"b")
    cluster.run_for(1500)
    assert not ack.settled
    assert cluster[2].log.end_offset == 1, "nor given anything"
    assert all(
        isinstance(one.error, FencedLeaderEpoch) for one in cluster[2].fetcher_manager.failed_replicas()
    )
    cluster.tell()
    cluster.run_until(lambda: ack.acknowledged, 5000)


def test_no_ack_before_the_shrinking_is_committed() -> None:
    cluster = running()
    cluster[1].store.held = True
    cluster.network.isolate(3)
    ack = cluster[1].append(b"a")
    cluster.run_until(lambda: cluster[1].store.waiting, LAG_MS_MAX + 2000)
    cluster.run_for(1000)
    assert cluster[1].partition.replica.pending_in_sync == {1, 2}  # type: ignore[union-attr]  # it leads
    assert not ack.settled
    cluster[1].store.release()
    cluster.run_until(lambda: ack.acknowledged, 1000)
    assert cluster.state().isr == (1, 2)


def test_a_replica_that_may_have_joined_is_waited_for() -> None:
    cluster = running()
    cluster.network.isolate(3)
    committed(cluster, b"a")
    assert cluster.state().isr == (1, 2)
    cluster.network.cut.clear()
    cluster[1].store.held = True
    cluster.run_until(lambda: cluster[1].store.waiting, 15_000)
    cluster.network.isolate(3)
    ack = cluster[1].append(b"b")
    cluster.run_for(1500)
    assert not ack.settled, "the store may have it in the set by now, and so may whoever elects"
    cluster[1].store.release()
    cluster.run_until(lambda: ack.settled, 3 * LAG_MS_MAX)
    assert ack.acknowledged, "it left again"
    assert cluster.state().isr == (1, 2)
    assert (cluster[1].isr_manager.expansion_count, cluster[1].isr_manager.shrink_count) == (1, 2)


def test_a_restarted_follower_is_not_added_for_what_it_had_before() -> None:
    cluster = running()
    cluster.network.isolate(3)
    committed(cluster, b"a")
    cluster.network.cut.clear()
    cluster[1].store.held = True
    cluster.run_until(lambda: cluster[1].store.waiting, 15_000)  # to take 3 in
    cluster.kill(3)
    cluster[3].disk = SimulatedDisk()  # it comes back with nothing
    cluster.restart(3)
    cluster.network.isolate(3)
    cluster[1].store.release()
    cluster.run_for(2000)
    assert 3 not in cluster.state().isr
    cluster.network.cut.clear()
    cluster.run_until(lambda: 3 in cluster.state().isr, 15_000)
    assert cluster[3].values() == [b"a"]


def test_a_late_request_of_an_earlier_session_counts_for_nothing() -> None:
    cluster = running()
    committed(cluster, b"a")
    frames: list[bytes] = []
    cluster.network.spy = lambda source, _, frame: frames.append(frame) if source == 3 else None
    cluster.run_for(1500)
    cluster.network.spy = None
    earlier_epoch = cluster.epochs[3]
    cluster.kill(3)
    cluster.end_session(3)
    cluster.run_until(lambda: cluster.state().isr == (1, 2), 2000)
    cluster[3].disk = SimulatedDisk()
    cluster.restart(3)
    cluster.network.isolate(3)
    answers: list[bytes] = []
    earlier_session = BrokerIdentity(3, earlier_epoch)
    cluster[1].receive(frames[-1], answers.append, earlier_session)
    cluster.run_for(2000)
    assert decode_response(17, answers[0]).error_code == StaleBrokerEpoch.kafka_code
    assert cluster.state().isr == (1, 2)


def test_a_member_whose_session_ended_is_not_waited_for() -> None:
    cluster = running()
    cluster.kill(3)
    ack = cluster[1].append(b"a")
    cluster.run_for(200)
    assert not ack.settled
    cluster.end_session(3)
    cluster.run_until(lambda: ack.acknowledged, 300)
    assert cluster.state().isr == (1, 2)


def test_a_woken_leader_acknowledges_nothing_and_gives_way() -> None:
    cluster = running()
    committed(cluster, b"a")
    zombie = cluster[1]
    lost = zombie.append(b"never acknowledged")
    zombie.session_until_s = zombie.clock.monotonic() + 4
    zombie.scheduler.pause()
    cluster.run_for(6000)
    cluster.end_session(1)
    cluster.elect(2, isr=(2, 3))
    cluster.tell(2, 3)
    cluster.run_for(1000)
    committed(cluster, b"b", leader=2)
    zombie.scheduler.resume()
    with pytest.raises(NotLeaderOrFollower):
        zombie.append(b"too late")
    cluster.run_for(3000)
    assert isinstance(lost.error, NotLeaderOrFollower)
    zombie.broker_epoch = cluster.register(1)
    zombie.session_until_s = float("inf")
    cluster.tell()
    cluster.run_until(lambda: cluster.settled() and 1 in cluster.state().isr)
    assert zombie.values() == [b"a", b"b"]
    cluster.check_same()


def test_nothing_is_acknowledged_after_the_session_deadline() -> None:
    """The followers go on; but it is unknown whether the store would not name another leader in this moment."""
    cluster = running()
    ack = cluster[1].append(b"a")
    cluster[1].session_until_s = 0
    with pytest.raises(NotLeaderOrFollower):
        cluster[1].append(b"b")
    cluster.run_until(lambda: cluster[3].log.durable_end_offset == 1, 500)
    cluster.run_for(1000)
    assert isinstance(ack.error, NotLeaderOrFollower)
    assert cluster[1].partition.high_watermark == 0
    cluster[1].session_until_s = float("inf")
    cluster.run_until(lambda: cluster[1].partition.high_watermark == 1, 1000)


def test_two_fast_leader_changes_leave_one_history() -> None:
    """KIP-279: each of the three has records that no other has; the one that leads at last decides."""
    cluster = running()
    committed(cluster, b"a")
    cluster.network.isolate(1)
    cluster.network.isolate(2)
    for number in range(3):
        cluster[1].append(b"only on 1: %d" % number)
    cluster.run_for(100)
    cluster.elect(2)
    cluster.tell(2)
    cluster.run_for(100)
    cluster[2].append(b"only on 2")
    cluster.run_for(100)
    cluster.elect(1)
    cluster.tell(1)
    cluster.run_for(100)
    cluster[1].append(b"again only on 1")
    cluster.run_for(100)
    cluster.elect(3)
    cluster.network.cut.clear()
    cluster.tell()
    cluster.run_for(100)
    ack = cluster[3].append(b"b")
    cluster.run_until(lambda: ack.acknowledged and cluster.settled())
    for node_id in (1, 2, 3):
        assert cluster[node_id].values() == [b"a", b"b"]
    cluster.check_same()


def test_an_epoch_that_the_leader_never_had_is_cut_off() -> None:
    """2 led for a moment and wrote alone; 3 leads now, and has more of the epoch before than 2 ever had."""
    cluster = running()
    committed(cluster, b"a")
    cluster.network.isolate(2)
    for value in (b"b", b"c", b"d"):
        cluster[1].append(value)
    cluster.run_until(lambda: cluster[3].log.durable_end_offset == 4)
    cluster.elect(2)
    cluster.tell(2)
    cluster.run_for(50)
    cluster[2].append(b"only on 2")
    cluster.run_for(50)
    cluster.elect(3)
    cluster.network.cut.clear()
    cluster.tell()
    cluster.run_until(lambda: cluster.settled() and cluster[3].partition.high_watermark == 4, 5000)
    for node_id in (1, 2, 3):
        assert cluster[node_id].values() == [b"a", b"b", b"c", b"d"]
    cluster.check_same()


def test_a_leader_that_wrote_nothing_in_its_epoch_copies_older_records_afterwards() -> None:
    cluster = running()
    committed(cluster, b"a")
    cluster.network.isolate(2)
    cluster[1].append(b"b")  # 2 never has it before it leads
    cluster.run_until(lambda: cluster[3].log.durable_end_offset == 2)
    cluster.elect(2)
    cluster.tell(2)
    cluster.run_for(500)
    cluster.elect(3)
    cluster.network.cut.clear()
    cluster.tell()
    cluster.run_until(lambda: cluster.settled() and cluster[3].partition.high_watermark == 2, 5000)
    cluster.check_same()
    cluster.kill(2, power=True)
    assert cluster.restart(2).values() == [b"a", b"b"]


@pytest.mark.parametrize("leader", [1, 2])
def test_a_wait_ends_with_the_leader_epoch_it_began_in(leader: int) -> None:
    """Also when the same broker is chosen again: it cannot know what was decided in between."""
    cluster = running()
    cluster.network.isolate(3)
    ack = cluster[1].append(b"a")
    cluster.run_for(200)
    assert not ack.settled
    cluster.elect(leader)
    cluster.tell()
    cluster.run_for(10)
    assert isinstance(ack.error, NotLeaderOrFollower)


def test_logs_that_part_within_an_epoch_are_cut_where_the_leaders_ends() -> None:
    """The old leader's followers have more of its epoch than the new one; the new one's own records come after."""
    cluster = running()
    committed(cluster, b"a")
    cluster.network.isolate(2)
    cluster[1].append(b"b", b"c")
    cluster.run_until(lambda: cluster[3].log.durable_end_offset == 3)
    cluster.network.cut.clear()
    cluster.network.isolate(1)
    cluster.elect(2)
    cluster.tell(2)
    cluster.run_for(50)
    ack = cluster[2].append(b"d", b"e", b"f", b"g")
    cluster.tell(3)
    cluster.network.cut.clear()
    cluster.tell(1)
    cluster.run_until(lambda: ack.acknowledged and cluster.settled())
    cluster.check_same()
    assert cluster[3].values() == [b"a", b"d", b"e", b"f", b"g"]


def test_a_new_leader_acknowledges_nothing_before_all_in_sync_have_fetched_in_its_epoch() -> None:
    cluster = running()
    committed(cluster, b"a")
    cluster.run_until(cluster.settled, 2000)
    cluster.network.isolate(3)
    lose_contact(cluster, 1)
    cluster.elect(2)
    cluster.tell(2)
    cluster.run_for(50)
    ack = cluster[2].append(b"b")
    cluster.run_for(1000)
    assert not ack.settled
    progress = cluster[2].partition.replica
    assert isinstance(progress, ReplicationProgress)
    assert progress.pending_in_sync is None or ack.error is None
    cluster.tell(3)
    cluster.network.cut.clear()
    cluster.network.isolate(1)
    cluster.run_until(lambda: ack.acknowledged, 10_000)
    assert cluster[3].values() == [b"a", b"b"]


def test_a_new_leader_does_not_tell_an_end_lower_than_one_that_was_seen() -> None:
    """KIP-207: what the old leader reported as committed may be news to the new one."""
    cluster = running()
    committed(cluster, b"a")  # 2 has not heard that it is
    cluster.network.isolate(3)
    cluster.elect(2)
    cluster.tell(2)
    cluster.run_for(5)
    partition = cluster[2].partition
    assert partition.high_watermark == 0
    with pytest.raises(OffsetNotAvailable):
        cluster[2].service.records.list_offset(None, TOPIC.bytes, 0, -1)
    cluster.network.cut.clear()
    cluster.tell()
    cluster.run_until(lambda: partition.high_watermark == 1)
    assert cluster[2].service.records.list_offset(None, TOPIC.bytes, 0, -1).offset == 1


@pytest.mark.parametrize("timestamp_ms", [0, -3])
def test_a_new_leader_does_not_say_that_there_is_no_record_of_a_time_before_it_knows(
    timestamp_ms: int,
) -> None:
    """A reader that receives "none at or after this time" goes on at the end, past records that are committed."""
    cluster = running()
    committed(cluster, b"a")  # 2 has not heard that it is
    cluster.network.isolate(3)
    cluster.elect(2)
    cluster.tell(2)
    cluster.run_for(5)
    partition = cluster[2].partition
    assert partition.high_watermark == 0
    with pytest.raises(OffsetNotAvailable):
        cluster[2].service.records.list_offset(None, TOPIC.bytes, 0, timestamp_ms)
    cluster.network.cut.clear()
    cluster.tell()
    cluster.run_until(lambda: partition.high_watermark == 1)
    found = cluster[2].service.records.list_offset(None, TOPIC.bytes, 0, timestamp_ms)
    assert (found.offset, found.timestamp_ms) == (0, 0)


def test_the_word_of_a_process_counts_for_nothing_once_another_disk_bore_its_number() -> None:
    """A hung broker was replaced under its number, on another machine with an empty disk. Then that one fails, too, and
    while the number has no session the hung one wakes: what is on its disk is not what the in-sync set stands for."""
    cluster = running()
    committed(cluster, b"a")
    hung = cluster[2]
    hung.scheduler.pause()
    cluster.end_session(2)
    cluster.run_until(lambda: cluster.state().isr == (1, 3))
    replacement = Node(cluster, 2, SimulatedDisk())
    cluster.tell()
    cluster.run_until(lambda: 2 in cluster.state().isr)
    cluster.kill(2, power=True)
    cluster.end_session(2)
    cluster[3].store.held = True  # the shrinking of the set does not get through
    cluster.kill(1)
    cluster.elect(3, isr=(3, 2))
    hung.scheduler.resume()
    for node in (hung, cluster[3]):
        node.scheduler.call_soon(node.replication.apply, node.partition, cluster.state())
    cluster.run_for(50)
    ack = cluster[3].append(b"b")
    cluster.run_for(2000)
    assert not ack.acknowledged, replacement.log.durable_end_offset


def test_a_follower_asks_at_once_again_when_its_broker_has_another_session() -> None:
    cluster = running()
    node = cluster[3]
    cluster.end_session(3)
    node.broker_epoch = 0
    cluster.run_for(15_000)
    ack = committed(cluster, b"a")
    assert node.log.end_offset == 0, "it is refused, and tries now and then"
    node.broker_epoch = cluster.register(3)
    cluster.tell(3)
    cluster.run_until(lambda: node.values() == ack.values, 250)


def test_a_broker_does_not_lead_again_in_an_epoch_it_may_have_lost_records_of() -> None:
    """Its unsynced records are on the followers; given out again under the same epoch, the offsets would differ."""
    cluster = running()
    slow = cluster[1].background
    slow._latency_ms = lambda: 1e6
    cluster[1].append(b"a")
    cluster.run_for(20)
    cluster[1].append(b"lost on 1, kept on 2 and 3")
    cluster.run_until(lambda: cluster[2].log.durable_end_offset == 2)
    cluster.kill(1, power=True)
    node = cluster.restart(1)
    cluster.run_for(50)
    assert not node.partition.is_leader, "chosen in a session that is over"
    state = cluster.state()
    with pytest.raises(FencedLeaderEpoch):
        node.partition.become_leader(state.leader_epoch, in_sync=state.isr, replicas=state.replicas)
    cluster.elect(1)
    cluster.tell()
    cluster.run_for(100)
    committed(cluster, b"b")
    cluster.run_until(cluster.settled)
    cluster.check_same()


def test_the_last_replica_standing_takes_nothing_with_min_insync_replicas() -> None:
    cluster = running(configs={"min.insync.replicas": "2"})
    committed(cluster, b"a")
    cluster.kill(3)
    cluster.end_session(3)
    committed(cluster, b"b")
    waiting = cluster[1].append(b"c")
    cluster.kill(2)
    cluster.end_session(2)
    cluster.run_until(lambda: waiting.settled, 2000)
    assert isinstance(waiting.error, NotEnoughReplicasAfterAppend)
    with pytest.raises(NotEnoughReplicas):
        cluster[1].append(b"d")
    late = cluster[1].partition.commit_promise(cluster[1].partition.end_offset)
    assert late.done(), "who asks now for what was written is told so, and not left to wait"
    with pytest.raises(NotEnoughReplicasAfterAppend):
        late.result()
    cluster.run_for(10_000)
    assert cluster.state().isr == (1,)
    assert cluster[1].partition.high_watermark == 2, "nothing is committed on one replica"
    cluster.restart(2)
    cluster.run_until(lambda: cluster[1].partition.replica.in_sync == {1, 2})  # type: ignore[union-attr]  # it leads
    committed(cluster, b"d")
    assert cluster[1].values(committed=True) == [b"a", b"b", b"c", b"d"], "what was written counts now"


def test_who_waits_gets_an_error_when_more_replicas_are_asked_for_than_there_are() -> None:
    cluster = running(configs={"min.insync.replicas": "2"})
    cluster.kill(3)
    cluster.end_session(3)
    committed(cluster, b"a")
    leader = cluster[1].partition
    waiting = cluster[1].append(b"b")
    leader.settings = dataclasses.replace(leader.settings, min_insync_replicas=3)
    cluster.run_until(lambda: waiting.settled, 2000)
    assert isinstance(waiting.error, NotEnoughReplicasAfterAppend)


def test_silent_replicas_leave_once_and_come_back_only_by_asking_again() -> None:
    """The leader reaches the store, and no other broker does: what it remembers of the others brings none of them
    back."""
    cluster = running(configs={"min.insync.replicas": "2"})
    committed(cluster, b"a")
    waiting = cluster[1].append(b"b")
    cluster.network.isolate(1)
    cluster.run_until(lambda: waiting.settled, 2 * LAG_MS_MAX)
    assert isinstance(waiting.error, NotEnoughReplicasAfterAppend)
    cluster.run_for(1000)
    epoch = cluster.state().partition_epoch
    cluster.run_for(5 * LAG_MS_MAX)
    assert cluster.state().isr == (1,)
    assert cluster.state().partition_epoch == epoch, "nobody came in and went out again"
    with pytest.raises(NotEnoughReplicas):
        cluster[1].append(b"c")
    cluster.network.cut.clear()
    cluster.run_until(lambda: cluster[1].partition.replica.in_sync == {1, 2, 3}, 30_000)  # type: ignore[union-attr]
    assert cluster[1].values(committed=True) == [b"a", b"b"]


def test_clients_are_not_served_by_followers() -> None:
    cluster = running()
    partition = cluster[2].partition
    with pytest.raises(NotLeaderOrFollower):
        cluster[2].append(b"a")
    with pytest.raises(NotLeaderOrFollower):
        partition.check_leader_epoch(-1)
    with pytest.raises(NotLeaderOrFollower):
        partition.delete_records(0)
    assert not partition.commit_promise(1).done() or partition.commit_promise(0).done()


def test_a_follower_behind_the_leaders_start_begins_again_there() -> None:
    cluster = running(configs={"min.insync.replicas": "1"})
    committed(cluster, b"a", b"b", b"c")
    cluster.run_until(cluster.settled)
    cluster.kill(3)
    cluster.end_session(3)
    for number in range(5):
        committed(cluster, b"x%d" % number, b"y%d" % number)
    cluster[1].partition.trim(8)  # inside of a batch
    node = cluster.restart(3)
    cluster.run_until(lambda: 3 in cluster.state().isr and cluster.settled() and node.log.start_offset == 8)
    assert node.values() == [b"y2", b"x3", b"y3", b"x4", b"y4"]
    assert not list(node.fetcher_manager.failed_replicas())
    node.log.verify()
    cluster.kill(3, power=True)
    again = cluster.restart(3)
    cluster.run_until(lambda: 3 in cluster.state().isr and again.log.start_offset == 8)
    assert again.values() == [b"y2", b"x3", b"y3", b"x4", b"y4"]


def test_gaps_of_a_compacted_leader_are_copied_also_at_the_end_of_its_log() -> None:
    cluster = running()
    committed(cluster, b"a")
    cluster.run_until(cluster.settled)
    cluster.kill(3)
    cluster.end_session(3)
    leader = cluster[1]
    leader.log._record_gaps_allowed(50)
    leader.log.end_offset = leader.log._active.end_offset = (
        50  # as if compaction had left nothing from here on
    )
    leader.bench.group_commit.request_flush(leader.log)
    cluster.run_until(lambda: cluster.settled() and cluster[2].log.end_offset == 50)
    assert committed(cluster, b"b").offset == 50
    for power in (False, True):
        node = cluster.restart(3)
        cluster.run_until(lambda: 3 in cluster.state().isr and cluster.settled())
        assert node.values() == [b"a", b"b"]
        node.log.verify()
        assert len(list(node.log.batches(0))) == 2, "there is a gap, as on the leader"
        cluster.kill(3, power=power)


def test_followers_give_up_what_their_leader_gave_up() -> None:
    cluster = running()
    committed(cluster, b"a", b"b")
    committed(cluster, b"c")
    cluster[1].partition.trim(2)
    cluster.run_until(lambda: all(cluster[node].log.start_offset == 2 for node in (1, 2, 3)), 2000)


def test_a_replica_whose_disk_fails_is_set_aside_and_the_others_go_on() -> None:
    cluster = running(partitions=2)
    cluster[3].disk.fail_when = lambda operation, path: (
        errno.EIO if operation == "write" and "t-0" in path else None
    )
    first, second = cluster[1].append(b"a", index=0), cluster[1].append(b"b", index=1)
    cluster.run_until(lambda: second.acknowledged, 2000)
    assert not first.settled
    failed_replicas = list(cluster[3].fetcher_manager.failed_replicas())
    assert [one.partition.index for one in failed_replicas] == [0]
    cluster.run_until(lambda: first.acknowledged, 2 * LAG_MS_MAX)
    assert (cluster.state(0).isr, cluster.state(1).isr) == ((1, 2), (1, 2, 3))


def test_an_unexpected_error_in_copying_one_partition_does_not_delay_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = running(partitions=2)
    append_as_follower, failing = Log.append_as_follower, [True]

    def defective(log: Log, *arguments: Any, **more: Any) -> int:
        if log is cluster[3].log and failing:
            raise OverflowError
        return append_as_follower(log, *arguments, **more)

    monkeypatch.setattr(Log, "append_as_follower", defective)
    first, second = cluster[1].append(b"a", index=0), cluster[1].append(b"b", index=1)
    cluster.run_until(lambda: second.acknowledged, 2000)
    assert not first.settled
    assert [one.partition.index for one in cluster[3].fetcher_manager.failed_replicas()] == [0]
    failing.clear()
    cluster.run_until(lambda: first.acknowledged, 5000)
    assert not list(cluster[3].fetcher_manager.failed_replicas())


def test_a_replica_on_a_full_disk_catches_up_when_there_is_room() -> None:
    cluster = running()
    cluster[3].disk.fail_when = lambda operation, path: errno.ENOSPC if operation == "write" else None
    ack = cluster[1].append(b"a")
    cluster.run_until(lambda: ack.acknowledged, 2 * LAG_MS_MAX)
    cluster[3].disk.fail_when = None
    cluster.run_until(lambda: 3 in cluster.state().isr)
    assert cluster[3].values() == [b"a"]


def test_replicas_far_behind_are_throttled_and_those_in_sync_are_not() -> None:
    settings = ReplicaFetcherSettings(catch_up_bytes_per_second=100_000, partition_bytes_max=50_000)
    cluster = running(configs={"min.insync.replicas": "1"}, follower_settings=settings, partitions=2)
    cluster.kill(3)
    cluster.end_session(3)
    for _ in range(100):
        committed(cluster, bytes(10_000))
    cluster.restart(3)
    began = cluster.simulation.now_ms
    cluster.run_until(lambda: 3 in cluster.state(1).isr, 3000)
    quick = committed(cluster, b"a")
    assert quick.acknowledged
    ack = cluster[1].append(bytes(1000), index=1)
    cluster.run_until(lambda: ack.acknowledged, 200)
    cluster.run_until(lambda: 3 in cluster.state(0).isr, 60_000)
    assert 8_000 < cluster.simulation.now_ms - began < 15_000, (
        "a million bytes at 100 kB/s, less a second's burst"
    )


def test_what_a_replica_copies_is_flushed_apart_from_what_producers_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = ReplicaFetcherSettings(partition_bytes_max=30_000)
    cluster = running(configs={"min.insync.replicas": "1"}, follower_settings=settings, partitions=3)
    cluster.kill(3)
    cluster.end_session(3)
    for _ in range(100):
        committed(cluster, bytes(10_000))
    prepare, syncs = GroupCommit._prepare_sync, list[set[int]]()

    def count(group_commit: GroupCommit) -> list[tuple[Log, FlushJob]]:
        found = prepare(group_commit)
        indexes = {
            index
            for index in range(3)
            for log, _ in found
            if cluster[3].partitions[TOPIC.bytes, index].log is log
        }
        if indexes and 3 not in cluster.state(0).isr:
            syncs.append(indexes)
        return found

    cluster.restart(3)
    cluster.run_until(lambda: 3 in cluster.state(1).isr and 3 in cluster.state(2).isr, 3000)
    cluster.elect(3, index=2)
    cluster.tell()
    cluster.run_until(lambda: cluster[3].partitions[TOPIC.bytes, 2].is_leader, 1000)
    cluster.run_for(50)  # a change of the leader flushes the log
    with monkeypatch.context() as counted:
        counted.setattr(GroupCommit, "_prepare_sync", count)
        acks = {1: cluster[1].append(b"a", index=1), 3: cluster[3].append(b"b", index=2)}
        while 3 not in cluster.state(0).isr:
            for leader, ack in acks.items():
                if ack.settled:
                    assert ack.acknowledged
                    acks[leader] = cluster[leader].append(b"a", index=2 if leader == 3 else 1)
            cluster.run_for(0.5)
    copies = [indexes for indexes in syncs if 0 in indexes]
    assert 5 < len(copies) < len(syncs)
    assert all(indexes == {0} for indexes in copies)


@pytest.mark.parametrize(
    ("before", "rate", "low_ms", "high_ms"),
    [
        (100_000, 0, 0, 3_500),
        (100_000, 1_000_000, 0, 4_500),
        (100_000, 50_000, 12_000, 30_000),
        pytest.param(100, 0, 0, 4_500, id="a-long-pause-ends"),
    ],
)
def test_the_throttle_of_replicas_changes_while_they_catch_up(
    before: int, rate: int, low_ms: int, high_ms: int
) -> None:
    settings = ReplicaFetcherSettings(catch_up_bytes_per_second=before, partition_bytes_max=50_000)
    cluster = running(configs={"min.insync.replicas": "1"}, follower_settings=settings)
    cluster.kill(3)
    cluster.end_session(3)
    for _ in range(100):
        committed(cluster, bytes(10_000))
    cluster.restart(3)
    began = cluster.simulation.now_ms
    cluster.run_for(2000)
    assert 3 not in cluster.state().isr
    cluster[3].fetcher_manager.set_catch_up_rate(rate)
    cluster.run_until(lambda: 3 in cluster.state().isr, 60_000)
    assert low_ms <= cluster.simulation.now_ms - began < high_ms


def test_a_leader_without_sessions_is_asked_for_lively_partitions_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mansio.broker.replication.replica_fetcher.IDLE_INTERVAL_PER_PARTITION_S", 0.01)
    cluster = Cluster(partitions=8, follower_settings=ReplicaFetcherSettings(all_partitions_max=4))
    cluster[1].service.fetch.sessions.slots_max = 0  # as an older version
    cluster.run_for(1000)
    asked: list[int] = []

    def count(source: int, _: int, frame: bytes) -> None:
        if source == 3:
            body = memoryview(frame)[4:]
            asked.append(len(decode_request(17, body, read_request_header(body).body_position).topics[0][2]))

    cluster.network.spy = count
    cluster.network.delay_ms = lambda: 0.1
    for _ in range(100):
        committed(cluster, b"a")
    assert {1, 8} == set(asked)
    quiet = cluster[1].append(b"b", index=7)
    cluster.run_until(lambda: quiet.acknowledged, 1000)


def test_a_lost_answer_of_the_store_is_cleared_up() -> None:
    cluster = running()
    for lost in ("lost_response_count", "lost_request_count"):
        cluster.network.isolate(3)
        setattr(cluster[1].store.store_client, lost, 1)
        committed(cluster, b"a")
        assert cluster.state().isr == (1, 2)
        cluster.network.cut.clear()
        setattr(cluster[1].store.store_client, lost, 7)  # more than are tried again at once
        cluster.run_until(lambda: 3 in cluster.state().isr, 20_000)
        ack = committed(cluster, b"b")
        assert cluster[3].log.durable_end_offset > ack.offset


def test_the_in_sync_sets_of_many_partitions_change_in_few_transactions() -> None:
    cluster = running(partitions=120)
    cluster.kill(3)
    first = cluster.store.revision
    cluster.end_session(3)
    everywhere = range(120)
    cluster.run_until(lambda: all(cluster.state(index).isr == (1, 2) for index in everywhere), 1000)
    assert cluster.store.revision - first <= 1 + 120 / 50 + 1
    cluster.restart(3)
    first = cluster.store.revision
    cluster.run_until(lambda: all(3 in cluster.state(index).isr for index in everywhere))
    assert cluster.store.revision - first <= 20


def test_a_conflict_about_one_partition_does_not_prevent_the_changes_of_others() -> None:
    cluster = running(partitions=10)
    cluster.kill(3)
    cluster[1].store.held = True
    cluster.end_session(3)
    cluster.run_until(lambda: cluster[1].store.waiting, 1000)
    cluster.elect(2, index=4)
    cluster[1].store.release()
    others = [index for index in range(10) if index != 4]
    cluster.run_until(lambda: all(cluster.state(index).isr == (1, 2) for index in others), 2000)
    changed = cluster.state(4)
    assert (changed.leader, changed.leader_epoch, changed.isr) == (2, 1, (1, 2, 3))
    cluster.run_until(lambda: cluster[1].isr_manager.shrink_count == 9, 1000)


def test_a_partition_that_is_led_in_a_new_epoch_during_a_check_is_still_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = running(partitions=40)
    leader = cluster[1]
    manager = leader.isr_manager
    monkeypatch.setattr(manager, "_turns", ItemTurns(leader.scheduler, Work.ISR_CHECK, items_max=8))
    cluster.kill(3)
    for index in range(40):
        leader.append(b"a", index=index)  # or nothing has to be checked
    manager._check()
    assert manager._unchecked
    cluster.elect(1, index=39)  # as at the end of a reassignment
    leader.replication.apply(leader.partitions[TOPIC.bytes, 39], cluster.state(39))
    cluster.tell(2)
    cluster.run_until(lambda: all(cluster.state(index).isr == (1, 2) for index in range(40)), 60_000)


def test_a_check_that_failed_is_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = running(partitions=2)
    manager = cluster[1].isr_manager

    def fail(_entry: object) -> None:
        raise ValueError("a defect")

    cluster.kill(3)
    for index in range(2):
        cluster[1].append(b"a", index=index)
    with monkeypatch.context() as patched:
        patched.setattr(manager, "_may_change", fail)
        patched.setattr(manager, "_checks_until_lag", 9)
        with pytest.raises(ValueError, match="a defect"):
            manager._check()
    cluster.run_until(lambda: all(cluster.state(index).isr == (1, 2) for index in range(2)), 60_000)


def test_a_proposal_stays_while_its_transaction_may_still_be_committed() -> None:
    """Another partition in the same transaction is not led any more, because its topic is deleted."""
    cluster = running(partitions=2)
    cluster.kill(3)
    cluster.end_session(3)
    cluster.run_until(lambda: all(cluster.state(index).isr == (1, 2) for index in range(2)), 3000)
    store = cluster[1].store
    transact = store.transact
    late: list[tuple[Any, Any]] = []

    async def lost(compares: Any, operations: Any) -> Any:
        if len(operations) == 2:
            late.append((compares, operations))
            await store._way()
            raise AmbiguousOutcome("no answer")
        return await transact(compares, operations)

    store.transact = lost
    cluster.restart(3)
    cluster.run_until(lambda: late, 10_000)
    deleted, other = (cluster[1].partitions[TOPIC.bytes, index] for index in range(2))
    cluster[1].replication.remove(deleted)
    deleted.resign()
    cluster.network.isolate(3)
    ack = cluster[1].append(b"a", index=1)
    cluster.run_for(1500)
    assert isinstance(other.replica, ReplicationProgress)
    assert other.replica.pending_in_sync == frozenset({1, 2, 3})
    assert cluster.store.transact(*late[0]).succeeded
    cluster.run_for(1500)
    assert cluster.state(1).isr == (1, 2, 3)
    assert not ack.acknowledged, "the third replica does not have it"


def test_the_check_of_in_sync_sets_does_little_for_partitions_without_a_change() -> None:
    cluster = running(partitions=200)
    manager = cluster[1].isr_manager
    manager._lag_ms_max = 30_000  # the default; the next check is about lag, too
    manager._check()
    with CallCounter() as counter:
        manager._check()
    assert counter.count <= 200 * 14


def test_a_change_by_the_controller_is_not_overwritten() -> None:
    cluster = running()
    cluster[1].store.held = True
    cluster.network.isolate(3)
    cluster[1].append(b"a")
    cluster.run_until(lambda: cluster[1].store.waiting, LAG_MS_MAX + 2000)
    cluster.elect(2)
    cluster[1].store.release()
    cluster.run_for(1000)
    state = cluster.state()
    assert (state.leader, state.leader_epoch, state.isr) == (2, 1, (1, 2, 3))
    assert cluster[1].partition.replica.high_watermark == 0


def test_the_same_seed_gives_the_same_history() -> None:
    traces = []
    for seed in (5, 5, 6):
        cluster = running(seed=seed)
        committed(cluster, b"a")
        cluster.kill(3)
        cluster.run_for(5000)
        traces.append(cluster.simulation.trace)
    assert traces[0] == traces[1] != traces[2]


def test_producers_are_remembered_by_the_next_leader_and_forgotten_with_what_was_cut() -> None:
    from mansio.wire.batch.record_batch import build_batch

    def batch(sequence: int, producer_id: int = 9) -> bytes:
        records = [(0, None, b"v", ())]
        return build_batch(records, producer_id=producer_id, producer_epoch=0, base_sequence=sequence)

    cluster = running()
    first = cluster[1].partition.append(batch(0))
    cluster.run_until(lambda: cluster[1].partition.high_watermark == 1)
    cluster.network.isolate(1)
    cluster[1].partition.append(batch(0, producer_id=8))  # nobody else ever has it
    cluster.run_for(50)
    cluster.elect(2)
    cluster.tell(2, 3)
    cluster.run_for(100)
    again = cluster[2].partition.append(batch(0))
    assert (again.base_offset, again.duplicate) == (first.base_offset, True)
    assert not cluster[2].partition.append(batch(1)).duplicate
    cluster.network.cut.clear()
    cluster.tell()
    cluster.run_until(lambda: cluster.settled() and cluster[1].log.end_offset == 2)
    cluster.elect(1)
    cluster.tell()
    cluster.run_for(100)
    assert cluster[1].partition.append(batch(1)).duplicate
    assert not cluster[1].partition.append(batch(2)).duplicate
    assert not cluster[1].partition.append(batch(0, producer_id=8)).duplicate
    assert KEYS.session(1) in {entry.key for entry in cluster.store.list(KEYS.prefix).entries}


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_replica_of_a_busy_partition_gets_in_sync_beside_idle_ones(partitions: int) -> None:
    """It changes to the fetcher of replicas that are in sync when the leader knows that it has caught up; the request
    of that fetcher may be held at the leader, which has no records of the idle partition."""
    cluster = Cluster(3, seed=1, partitions=partitions)
    simulation = cluster.simulation
    simulation.run_for(500)
    cluster.kill(3)
    cluster.end_session(3)
    simulation.run_until(lambda: 3 not in cluster.state(0).isr, within_ms=5000)
    value = b"x" * 100_000
    for _ in range(60):
        cluster[1].append(value)
        simulation.run_for(2)
    cluster.restart(3)
    cluster.tell()
    for _ in range(400):
        if 3 in cluster.state(0).isr:
            break
        cluster[1].append(value)
        simulation.run_for(12)
    assert 3 in cluster.state(0).isr
