"""Coordinators in a cluster: a group is served by the leader of its partition, and no state is lost or invented when
the leader moves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mansio.broker.coordinator.checkpoint import RECORDS_PER_YIELD, CheckpointStorage
from mansio.broker.coordinator.runtime import (
    LOAD_ATTEMPTS_MAX,
    LOAD_BACKOFF_MS_MAX,
    UPDATES_PER_YIELD,
    CoordinatorRuntime,
)
from mansio.broker.routing.routes import java_string_hash
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    CorruptLog,
    InvalidReplicationFactor,
    NotCoordinator,
    NotEnoughReplicasAfterAppend,
)
from mansio.testing.disk import SimulatedDisk
from mansio.wire.api_versions import ApiKey
from unit.broker.cluster_fixtures import PARTITIONS, CoordinatorReplica, GroupCluster, group_in
from unit.broker.groups_fixtures import VirtualScheduler
from unit.broker.test_coordinator_runtime import DictView
from unit.broker.test_groups import ASSIGNMENT, SUBSCRIPTION, code, commit_fields

LOADING, NOT_AVAILABLE, NOT_COORDINATOR, UNKNOWN_MEMBER = 14, 15, 16, 25
HOME = (java_string_hash("g") & 0x7FFFFFFF) % PARTITIONS  # where the group lives that `Broker.join` joins
LEADER, OTHER = HOME + 1, (HOME + 1) % 3 + 1


def find(cluster: GroupCluster, node_id: int, group: str, version: int = 6) -> Any:
    broker = cluster.brokers[node_id]
    keys = {"coordinator_keys": [group]} if version >= 4 else {"key": group}
    answer = broker.call(ApiKey.FIND_COORDINATOR, version, **keys, key_type=0)
    return answer.coordinators[0] if version >= 4 else answer


def offsets_of(broker: Any, group: str = "g") -> Any:
    return broker.call(ApiKey.OFFSET_FETCH, groups=[{"group_id": group, "topics": None}]).groups[0]


# Who coordinates


@pytest.mark.parametrize("version", [1, 3, 6])
def test_every_broker_names_the_same_coordinator_and_the_first_that_is_asked_makes_the_topic(
    version: int,
) -> None:
    cluster = GroupCluster()
    for index in range(PARTITIONS):
        leader = index + 1
        for node_id in cluster.brokers:
            found = find(cluster, node_id, group_in(index), version)
            assert (found.error_code, found.node_id) == (0, leader)
            own = ("broker", 9092)  # the listener the request came through
            assert (found.host, found.port) == (
                own if node_id == leader else (f"host{leader}", 9000 + leader)
            )
    assert cluster.made_times == 1


def test_without_a_leader_there_is_no_coordinator_until_there_is_one() -> None:
    cluster = GroupCluster().made()
    cluster.leaders[HOME] = -1
    found = find(cluster, OTHER, "g")
    assert (found.error_code, found.node_id, found.host, found.port) == (NOT_AVAILABLE, -1, "", -1)
    cluster.leaders[HOME] = OTHER
    assert find(cluster, LEADER, "g").node_id == OTHER


def test_where_the_topic_cannot_be_made_members_are_asked_to_try_again() -> None:
    cluster = GroupCluster()
    cluster.fail = InvalidReplicationFactor("2 brokers")
    assert find(cluster, 1, "g").error_code == NOT_AVAILABLE
    assert cluster.brokers[1].join().result().error_code == NOT_AVAILABLE
    cluster.fail = None
    assert find(cluster, 1, "g").error_code == 0


def test_of_many_that_come_at_once_one_makes_the_topic_and_none_waits_for_ever() -> None:
    """Another client may be at it: then there is nothing to wait for here, and the client comes again."""
    scheduler = VirtualScheduler()
    made: list[int] = []

    async def create() -> list[Any]:
        made.append(1)
        turn = scheduler.promise()
        scheduler.call_later(5, turn.set_result, None)
        await turn
        return []

    topic = CoordinatorRuntime(
        "__views",
        view=DictView(),
        create=create,
        scheduler=scheduler,
        clock=scheduler,
        partition_count=lambda: 0,
    )
    waiting = [scheduler.start(topic.ensure_topic_exists()) for _ in range(3)]
    scheduler.pass_time(5)
    for one in waiting:
        with pytest.raises(CoordinatorNotAvailable):
            one.result()
    assert len(made) == 1


def test_a_broker_that_does_not_coordinate_a_group_refuses_every_request() -> None:
    cluster = GroupCluster().made()
    joined = cluster.brokers[LEADER].stable()
    cluster.brokers[LEADER].commit(5, joined)
    cluster.scheduler.turn()
    members = [{"member_id": joined.member_id}]
    for broker in (cluster.brokers[OTHER], GroupCluster().brokers[1]):  # the second knows of no topic yet
        assert broker.heartbeat(joined) == NOT_COORDINATOR
        assert broker.join(joined.member_id).result().error_code == NOT_COORDINATOR
        assert broker.sync(joined).result().error_code == NOT_COORDINATOR
        assert broker.call(ApiKey.LEAVE_GROUP, 5, group_id="g", members=members).error_code == NOT_COORDINATOR
        assert broker.call(ApiKey.LEAVE_GROUP, 2, group_id="g", member_id="x").error_code == NOT_COORDINATOR
        assert code(broker.commit(6, joined)) == NOT_COORDINATOR
        assert offsets_of(broker).error_code == NOT_COORDINATOR
        old = broker.call(ApiKey.OFFSET_FETCH, 5, group_id="g", topics=None)
        assert (old.error_code, list(old.topics)) == (NOT_COORDINATOR, [])
        assert broker.call(ApiKey.DESCRIBE_GROUPS, groups=["g"]).groups[0].error_code == NOT_COORDINATOR
        assert broker.call(ApiKey.DELETE_GROUPS, groups_names=["g"]).results[0].error_code == NOT_COORDINATOR
        wanted = [{"name": "t", "partitions": [{"partition_index": 0}]}]
        assert broker.call(ApiKey.OFFSET_DELETE, group_id="g", topics=wanted).error_code == NOT_COORDINATOR
        assert broker.call(ApiKey.LIST_GROUPS).groups == []
    listed = cluster.brokers[LEADER].call(ApiKey.LIST_GROUPS).groups
    assert [each.group_id for each in listed] == ["g"]


def test_a_new_leader_lists_no_groups_before_it_has_loaded_those_of_its_new_partition() -> None:
    """Metadata names it as the leader before its role is applied, and that before the groups are loaded."""
    cluster = GroupCluster().made()
    assert code(cluster.brokers[LEADER].commit(1)) == 0
    listing = cluster.brokers[OTHER]
    assert listing.call(ApiKey.LIST_GROUPS).error_code == 0
    cluster.move(HOME, OTHER)
    answer = listing.call(ApiKey.LIST_GROUPS)
    assert (answer.error_code, list(answer.groups)) == (LOADING, [])
    while_loading: list[int] = []
    cluster.partitions[HOME].on_read = lambda _: while_loading.append(
        listing.call(ApiKey.LIST_GROUPS).error_code
    )
    cluster.tell(HOME)
    cluster.scheduler.turn()
    assert while_loading
    assert set(while_loading) == {LOADING}
    answer = listing.call(ApiKey.LIST_GROUPS)
    assert (answer.error_code, [each.group_id for each in answer.groups]) == (0, ["g"])
    assert cluster.brokers[LEADER].call(ApiKey.LIST_GROUPS).error_code == 0


def test_a_new_member_elsewhere_makes_the_topic_and_is_sent_on() -> None:
    cluster = GroupCluster()
    assert cluster.brokers[OTHER].join().result().error_code == NOT_COORDINATOR
    assert cluster.made_times == 1
    assert code(cluster.brokers[OTHER].commit(1)) == NOT_COORDINATOR


def test_offsets_of_partitions_on_other_brokers_can_be_committed_and_of_none_cannot() -> None:
    """The coordinator has a copy of neither: the metadata say that there is a t-0."""
    cluster = GroupCluster().made()
    broker = cluster.brokers[LEADER]
    assert code(broker.commit(7)) == 0
    answer = broker.call(ApiKey.OFFSET_COMMIT, **commit_fields(7, topic="none"))
    assert answer.topics[0].partitions[0].error_code == 3
    assert broker.committed() == {("t", 0): 7}


# After a fail-over


def test_after_a_fail_over_generation_assignment_and_offsets_are_as_committed_and_sessions_begin_again() -> (
    None
):
    cluster = GroupCluster().made()
    old, new = cluster.brokers[LEADER], cluster.brokers[OTHER]
    joined = old.stable()
    old.commit(5, joined)
    cluster.scheduler.pass_time(9_000)  # a second before its session ends
    cluster.move(HOME, OTHER, cut=True)
    cluster.scheduler.pass_time(3_000)  # while nobody leads, nobody's session ends
    cluster.tell(HOME)
    cluster.scheduler.turn()
    assert old.heartbeat(joined) == NOT_COORDINATOR
    cluster.scheduler.pass_time(9_900)
    assert new.heartbeat(joined) == 0
    assert new.sync(joined).result().assignment == ASSIGNMENT
    assert new.committed() == {("t", 0): 5}
    assert code(new.commit(6, joined)) == 0
    cluster.scheduler.pass_time(10_001)
    assert new.heartbeat(joined) == UNKNOWN_MEMBER
    assert new.committed() == {("t", 0): 6}


def test_a_generation_goes_on_from_where_it_was_committed() -> None:
    cluster = GroupCluster().made()
    joined = cluster.brokers[LEADER].stable()
    cluster.move(HOME, OTHER)
    cluster.tell(HOME)
    cluster.scheduler.turn()
    protocols = [{"name": "range", "metadata": SUBSCRIPTION + b"\0"}]
    joining = cluster.brokers[OTHER].join(joined.member_id, protocols=protocols)
    cluster.scheduler.pass_time(100)
    again = joining.result()
    assert (again.error_code, again.generation_id) == (0, joined.generation_id + 1)


def test_a_member_that_does_not_come_after_a_fail_over_is_put_out_when_its_session_is_over() -> None:
    cluster = GroupCluster().made()
    cluster.brokers[LEADER].stable()
    cluster.move(HOME, OTHER)
    cluster.tell(HOME)
    cluster.scheduler.pass_time(10_500)  # nobody asks for anything meanwhile
    group = cluster.brokers[OTHER].groups.store.entries["g"].group
    assert (str(group.state), len(group.members)) == ("Empty", 0)


def test_what_the_new_leader_has_is_answered_only_when_it_is_committed_there() -> None:
    cluster = GroupCluster().made()
    cluster.brokers[LEADER].commit(5)
    cluster.scheduler.turn()
    partition = cluster.move(HOME, OTHER)
    partition.high_watermark = 0  # its followers have not asked yet in this epoch
    cluster.tell(HOME)
    fetching = cluster.brokers[OTHER].begin(ApiKey.OFFSET_FETCH, groups=[{"group_id": "g", "topics": None}])
    cluster.scheduler.pass_time(60_000)
    assert not fetching.done()
    partition.sync()
    cluster.scheduler.turn()
    assert fetching.result().groups[0].topics[0].partitions[0].committed_offset == 5


def test_an_assignment_that_may_yet_be_lost_is_not_given_out_by_the_new_leader() -> None:
    cluster = GroupCluster().made()
    joined = cluster.brokers[LEADER].stable()
    partition = cluster.move(HOME, OTHER)
    partition.high_watermark = 0
    cluster.tell(HOME)
    cluster.scheduler.turn()
    syncing = cluster.brokers[OTHER].sync(joined)
    cluster.scheduler.pass_time(5_000)
    assert not syncing.done()
    partition.sync()
    cluster.scheduler.turn()
    assert syncing.result().assignment == ASSIGNMENT


def test_what_is_committed_while_an_answer_waits_is_not_in_it() -> None:
    """It may not be durable when the answer is: then it would show a state that can be taken back."""
    cluster = GroupCluster().made()
    broker, partition = cluster.brokers[LEADER], cluster.partitions[HOME]
    broker.commit(5)
    cluster.scheduler.turn()
    partition.holds = True
    broker.commit(6)
    fetching = broker.begin(ApiKey.OFFSET_FETCH, groups=[{"group_id": "g", "topics": None}])
    broker.commit(7)
    partition.sync(partition.end_offset - 1)
    cluster.scheduler.turn()
    assert fetching.result().groups[0].topics[0].partitions[0].committed_offset == 6


def test_an_answer_on_its_way_when_the_leader_moves_is_not_an_empty_one() -> None:
    """Nothing committed means to begin at the start, or at the end: a consumer must never hear it by mistake."""
    cluster = GroupCluster().made()
    old, partition = cluster.brokers[LEADER], cluster.partitions[HOME]
    old.commit(5)
    cluster.scheduler.turn()
    partition.holds = True
    committing = old.commit(6)
    fetching = old.begin(ApiKey.OFFSET_FETCH, groups=[{"group_id": "g", "topics": None}])
    partition.sync()  # all is committed, and before anybody is told the leadership is gone
    cluster.move(HOME, OTHER)
    cluster.scheduler.turn()
    assert code(committing) == 0
    found = fetching.result().groups[0]
    assert (found.error_code, list(found.topics)) == (NOT_COORDINATOR, [])


def test_a_parked_join_ends_with_the_leadership() -> None:
    cluster = GroupCluster().made()
    old = cluster.brokers[LEADER]
    old.stable()
    parked = old.join(old.join().result().member_id)
    cluster.scheduler.turn()
    assert not parked.done()
    cluster.move(HOME, OTHER)
    cluster.scheduler.turn()
    assert parked.result().error_code == NOT_COORDINATOR


def test_a_parked_sync_ends_with_the_leadership() -> None:
    cluster = GroupCluster().made()
    old = cluster.brokers[LEADER]
    first, second = old.join(old.join().result().member_id), old.join(old.join().result().member_id)
    cluster.scheduler.pass_time(500)
    answers = [first.result(), second.result()]
    follower = next(each for each in answers if each.leader != each.member_id)
    parked = old.sync(follower)
    cluster.scheduler.turn()
    assert not parked.done()
    cluster.move(HOME, OTHER)
    cluster.scheduler.turn()
    assert parked.result().error_code == NOT_COORDINATOR


def test_a_former_coordinator_runs_no_timer_and_writes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """No timer ends a session there, nothing is written, and what it held back is held no more."""
    cluster = GroupCluster().made()
    old = cluster.brokers[LEADER]
    joined = old.stable()
    old.commit(5, joined)
    cluster.scheduler.turn()
    stays = group_in((HOME + 1) % PARTITIONS)
    neighbour = cluster.brokers[(HOME + 1) % PARTITIONS + 1]
    neighbour.call(ApiKey.OFFSET_COMMIT, **{**commit_fields(9), "group_id": stays})
    before = cluster.partitions[HOME]
    protocols = [{"name": "range", "metadata": SUBSCRIPTION + b"\0"}]
    again = old.join(joined.member_id, protocols=protocols)
    cluster.scheduler.turn()
    before.holds = True
    syncing = old.sync(again.result())  # its record is written, and not committed yet
    caplog.clear()
    cluster.move(HOME, OTHER)
    stored = len(before.stored)
    cluster.scheduler.turn()
    assert syncing.result().error_code == NOT_COORDINATOR
    timers = [each for each in cluster.scheduler._timers if not each[2].cancelled]
    assert not [each for each in timers if each[3] == old.groups.actions.handle_timer]
    cluster.scheduler.pass_time(120_000)
    assert len(before.stored) == stored
    assert not old.groups.store.entries
    assert not [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    assert old.reported["g", "t", 0] is None
    assert neighbour.committed(stays) == {("t", 0): 9}


def test_a_repeated_role_changes_nothing() -> None:
    cluster = GroupCluster().made()
    broker = cluster.brokers[LEADER]
    broker.stable()
    parked = broker.join(broker.join().result().member_id)
    entry = broker.groups.store.entries["g"]
    for _ in range(3):
        cluster.tell(HOME)
        cluster.scheduler.turn()
    assert broker.groups.store.entries["g"] is entry
    assert not parked.done()


def test_a_broker_that_leads_again_begins_from_the_log() -> None:
    """Its log may have been cut meanwhile: what it knew before does not count."""
    cluster = GroupCluster().made()
    broker = cluster.brokers[LEADER]
    broker.commit(5)
    cluster.scheduler.turn()
    cluster.partitions[HOME].holds = True
    broker.commit(6)
    cluster.move(HOME, LEADER, cut=True)
    cluster.tell(HOME)
    cluster.scheduler.turn()
    assert broker.committed() == {("t", 0): 5}


def test_a_coordinator_that_may_be_none_any_more_returns_no_offsets() -> None:
    """Another broker may have taken newer commits by now: a member would go back and have records a second time."""
    cluster = GroupCluster().made()
    broker = cluster.brokers[LEADER]
    broker.commit(5)
    cluster.scheduler.turn()
    cluster.partitions[HOME].is_leadership_uncertain = True
    assert offsets_of(broker).error_code == NOT_COORDINATOR
    cluster.partitions[HOME].is_leadership_uncertain = False
    assert broker.committed() == {("t", 0): 5}


def test_too_few_replicas_are_an_error_that_members_wait_out() -> None:
    cluster = GroupCluster().made()
    broker, partition = cluster.brokers[LEADER], cluster.partitions[HOME]
    partition.holds = True
    committing = broker.commit(5)
    partition.fail(NotEnoughReplicasAfterAppend("1 replica"))  # type: ignore[arg-type]  # any error will do
    cluster.scheduler.turn()
    assert code(committing) == NOT_AVAILABLE


# Topics that are deleted


def test_offsets_of_a_deleted_topic_are_forgotten_by_each_coordinator_of_the_group() -> None:
    cluster = GroupCluster().made()
    cluster.brokers[LEADER].commit(5)
    cluster.scheduler.turn()
    cluster.topics.clear()
    for broker in cluster.brokers.values():
        cluster.scheduler.run(broker.groups.offsets.delete_offsets_of_topic("t"))
    assert cluster.brokers[LEADER].committed() == {}
    assert [len(each.stored) for each in cluster.partitions] == [
        2 if index == HOME else 0 for index in range(PARTITIONS)
    ]


def test_offsets_of_a_topic_made_again_are_not_forgotten_with_those_of_the_one_before() -> None:
    """Forgetting waits until each group's tombstones are committed; by then another topic may bear the name."""
    cluster = GroupCluster().made()
    broker, partition = cluster.brokers[LEADER], cluster.partitions[HOME]
    first, second = group_in(HOME, 0), group_in(HOME, 1)
    for group in (first, second):
        broker.call(ApiKey.OFFSET_COMMIT, **{**commit_fields(9), "group_id": group})
    partition.holds = True
    forgetting = cluster.scheduler.start(broker.groups.offsets.delete_offsets_of_topic("t"))
    assert not forgetting.done(), "the first group's are being forgotten"
    committing = broker.begin(ApiKey.OFFSET_COMMIT, **{**commit_fields(3), "group_id": second})
    partition.holds = False
    partition.sync()
    cluster.scheduler.turn()
    assert forgetting.done()
    assert committing.done()
    assert broker.committed(first) == {}
    assert broker.committed(second) == {("t", 0): 3}


def test_offsets_of_a_topic_that_was_deleted_while_no_broker_led_are_forgotten_by_the_next_leader() -> None:
    cluster = GroupCluster().made()
    cluster.brokers[LEADER].commit(5)
    cluster.scheduler.turn()
    cluster.move(HOME, OTHER)
    cluster.topics.clear()
    for broker in cluster.brokers.values():
        cluster.scheduler.run(broker.groups.offsets.delete_offsets_of_topic("t"))
    cluster.tell(HOME)
    cluster.scheduler.turn()
    cluster.topics.add("t")  # another one, of the same name
    assert cluster.brokers[OTHER].committed() == {}


def test_one_group_that_cannot_be_written_does_not_keep_others_from_forgetting() -> None:
    cluster = GroupCluster().made()
    broker = cluster.brokers[LEADER]
    first, second = group_in(HOME, 0), group_in((HOME + 1) % PARTITIONS)
    cluster.move((HOME + 1) % PARTITIONS, LEADER)
    cluster.tell((HOME + 1) % PARTITIONS)
    cluster.scheduler.turn()
    for group in (second, first):
        broker.call(ApiKey.OFFSET_COMMIT, **{**commit_fields(9), "group_id": group})
    cluster.partitions[(HOME + 1) % PARTITIONS].refuses = CorruptLog("no")
    cluster.scheduler.run(broker.groups.offsets.delete_offsets_of_topic("t"))
    assert broker.committed(first) == {}


# Loading and unloading


class Views:
    """One internal topic of two partitions in a cluster, and its view."""

    def __init__(self, **options: Any) -> None:
        self.scheduler = VirtualScheduler()
        self.view = UnloadableView()
        self.topic = CoordinatorRuntime(
            "__views",
            view=self.view,
            create=self.create,
            scheduler=self.scheduler,
            clock=self.scheduler,
            partition_count=lambda: 2,
            **options,
        )

    async def create(self) -> list[Any]:
        raise AssertionError("it is there")

    def partition(self, values: dict[bytes, bytes], index: int = 0, epoch: int = 0) -> CoordinatorReplica:
        """With a log of these values, a batch each; large enough for several turns of loading."""
        partition = CoordinatorReplica(self.scheduler, index, epoch)
        writer = Writer(self.scheduler, partition)
        for key, value in values.items():
            writer.write([(key, b"old")] * (RECORDS_PER_YIELD // 2))
            writer.write([(key, value)])
        partition.sync()
        return partition


class Writer:
    def __init__(self, scheduler: VirtualScheduler, partition: CoordinatorReplica) -> None:
        self.topic = CoordinatorRuntime(
            "__views",
            view=UnloadableView(),
            create=lambda: None,  # type: ignore[arg-type,return-value]  # not called
            scheduler=scheduler,
            clock=scheduler,
        )
        scheduler.run(self.topic.start([partition]))

    def write(self, records: list[tuple[bytes, bytes | None]]) -> None:
        self.topic.append(0, records)


class UnloadableView(DictView):
    def unload(self, index: int) -> None:
        self.values[index].clear()
        self.ready.discard(index)


def values(prefix: bytes, count: int = 8) -> dict[bytes, bytes]:
    return {prefix + b"%d" % number: prefix for number in range(count)}


def test_while_the_log_is_read_every_request_has_to_wait_and_nothing_shows() -> None:
    views = Views()
    partition = views.partition(values(b"a"))
    seen = []

    def look(number: int) -> None:
        with pytest.raises(CoordinatorLoadInProgress):
            views.topic.check_loaded(0)
        with pytest.raises(CoordinatorLoadInProgress):
            views.topic.check_all_loaded()
        with pytest.raises(CoordinatorLoadInProgress):
            views.topic.append(0, [(b"x", b"y")])
        seen.append(dict(views.view.values[0]))

    partition.on_read = look
    views.topic.lead(0, partition, 0)
    views.scheduler.turn()
    assert len(seen) == 16
    assert seen == [{}] * 16
    views.topic.check_loaded(0)
    assert views.view.values[0] == values(b"a")
    with pytest.raises(NotCoordinator):
        views.topic.check_loaded(1)


def test_a_log_that_is_kept_record_by_record_is_loaded_in_short_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Opening and folding each takes long, and a loop that hangs for longer than a session lasts loses its roles."""
    views = Views(replays_every_record=True)
    partition = CoordinatorReplica(views.scheduler, 0, 0)
    writer = Writer(views.scheduler, partition)
    for number in range(3 * UPDATES_PER_YIELD):
        writer.write([(b"key", b"%d" % number)])
    partition.sync()
    read, turns = [0], [0]

    async def breathing(delay_ms: float) -> None:
        turns.append(read[0])
        await sleep(delay_ms)

    def count(number: int) -> None:
        read[0] = number

    partition.on_read = count
    sleep = views.scheduler.sleep
    monkeypatch.setattr(views.scheduler, "sleep", breathing)
    views.topic.lead(0, partition, 0)
    views.scheduler.turn()
    assert views.view.values[0] == {b"key": b"%d" % (3 * UPDATES_PER_YIELD - 1)}
    turns.append(read[0])
    assert max(after - before for before, after in itertools.pairwise(turns)) <= UPDATES_PER_YIELD


def test_a_leadership_that_ends_while_it_is_loaded_leaves_nothing_and_reads_no_further() -> None:
    views = Views()
    partition = views.partition(values(b"a"))
    other = views.partition(values(b"b"), 1)

    def stop(number: int) -> None:
        if number == 5:
            views.scheduler.call_soon(views.topic.resign, 0)

    partition.on_read = stop
    views.topic.lead(0, partition, 0)
    views.topic.lead(1, other, 0)
    views.scheduler.turn()
    assert partition.batches_read < 16
    assert views.view.values == [{}, values(b"b")]
    assert views.view.ready == {1}
    with pytest.raises(NotCoordinator):
        views.topic.check_loaded(0)


@pytest.mark.parametrize("turns", range(8))
def test_a_flurry_of_roles_ends_in_the_last_one(turns: int) -> None:
    """Each leadership has another log; whenever the changes come, only the last log shows."""
    views = Views()
    logs = [views.partition(values(b"%c" % (97 + each)), 0, each) for each in range(4)]

    def later(steps: int, act: Any, *args: Any) -> None:
        if steps:
            views.scheduler.call_soon(later, steps - 1, act, *args)
        else:
            act(*args)

    def flurry(remaining: list[CoordinatorReplica]) -> None:
        views.topic.resign(0)
        views.topic.lead(0, remaining[0], remaining[0].leader_epoch)
        if remaining[1:]:
            later(turns, flurry, remaining[1:])

    flurry(logs)
    views.scheduler.pass_time(1000)
    assert views.view.values == [values(b"d"), {}]
    assert views.topic.is_leader(0, logs[3], 3)
    assert not views.topic.is_leader(0, logs[3], 2)
    views.topic.check_loaded(0)


def test_the_next_leadership_of_the_same_broker_begins_from_its_log() -> None:
    """Also where it was not seen that another led in between."""
    views = Views()
    for epoch, prefix in enumerate((b"a", b"b")):
        views.topic.lead(0, views.partition(values(prefix), 0, epoch), epoch)
        views.scheduler.pass_time(1000)
        assert views.view.values == [values(prefix), {}]


def test_a_flurry_that_ends_without_the_leadership_leaves_nothing() -> None:
    views = Views()
    for epoch in range(3):
        views.topic.lead(0, views.partition(values(b"a"), 0, epoch), epoch)
        views.topic.resign(0)
    views.scheduler.pass_time(1000)
    assert views.view.values == [{}, {}]
    assert not views.view.ready


def test_a_segment_that_compaction_took_away_is_read_again() -> None:
    views = Views()
    partition = views.partition(values(b"a"))
    reads = []

    def fail_once(number: int) -> None:
        reads.append(number)
        if reads.count(3) == 1 and number == 3:
            raise CorruptLog("the segment is missing")

    partition.on_read = fail_once
    views.topic.lead(0, partition, 0)
    views.scheduler.pass_time(1000)
    views.topic.check_loaded(0)
    assert views.view.values[0] == values(b"a")


@pytest.mark.parametrize("error", [CorruptLog("damaged"), OSError(5, "damaged")])
def test_a_log_that_stays_unreadable_is_refused_and_tried_ever_more_rarely_until_it_is_read(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    views = Views()
    partition = views.partition(values(b"a"))
    reads = []

    def fail(number: int) -> None:
        reads.append(number)
        raise error

    partition.on_read = fail
    views.topic.lead(0, partition, 0)
    views.topic.lead(1, views.partition(values(b"b"), 1), 0)
    views.scheduler.pass_time(900)
    assert len(reads) == LOAD_ATTEMPTS_MAX
    assert views.view.values == [{}, values(b"b")], "the next one waits for the first attempts only"
    views.scheduler.pass_time(3_600_000)
    assert 3600 <= len(reads) * LOAD_BACKOFF_MS_MAX / 1000 <= 3600 + 600
    assert [record.message for record in caplog.records] == ["view_not_loaded"] * len(reads)
    with pytest.raises(CoordinatorNotAvailable, match="damaged"):
        views.topic.check_loaded(0)
    partition.on_read = lambda _: None
    views.scheduler.pass_time(LOAD_BACKOFF_MS_MAX)
    views.topic.check_loaded(0)
    assert views.view.values == [values(b"a"), values(b"b")]


def test_a_log_that_was_unreadable_is_not_tried_again_for_a_leadership_that_is_over() -> None:
    views = Views()
    partition = views.partition(values(b"a"))
    reads = []

    def fail(number: int) -> None:
        reads.append(number)
        raise CorruptLog("damaged")

    partition.on_read = fail
    views.topic.lead(0, partition, 0)
    views.scheduler.pass_time(900)
    views.topic.resign(0)
    views.scheduler.pass_time(10 * LOAD_BACKOFF_MS_MAX)
    assert len(reads) == LOAD_ATTEMPTS_MAX


def test_no_checkpoint_is_written_or_believed_in_a_cluster() -> None:
    """The file may be of a log that has been cut since, or of one that another broker went on with."""
    disk = SimulatedDisk()
    single = VirtualScheduler()
    partition = CoordinatorReplica(single, 0, 0)
    room = CheckpointStorage(disk, single, "data/views", 1)
    alone = CoordinatorRuntime(
        "__views",
        view=UnloadableView(),
        create=lambda: None,  # type: ignore[arg-type,return-value]  # not called
        scheduler=single,
        clock=single,
        checkpoints=room,
    )
    single.run(alone.start([partition]))
    alone.append(0, [(b"a", b"of an old log")])
    single.turn()
    single.run(alone.close())
    assert disk.exists("data/views/__views-0.checkpoint")
    before = disk.read_file("data/views/__views-0.checkpoint")

    views = Views(checkpoints=room)
    views.topic.lead(0, views.partition({b"b": b"1"}), 3)
    views.scheduler.turn()
    assert views.view.values[0] == {b"b": b"1"}
    views.topic.append(0, [(b"b", b"2")] * 50)
    views.scheduler.turn()
    views.scheduler.run(views.topic.close())
    assert disk.read_file("data/views/__views-0.checkpoint") == before
    assert views.topic.replay_start_offset(0) is None  # so compaction need not keep tombstones for it
