"""Execution of moves by `mansio cluster`: room of brokers, failures, interruptions, throttle."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from mansio.cli.admin import cluster as commands
from mansio.cli.admin import cluster_moves
from mansio.cli.admin.cluster_moves import (
    MoveRunner,
    Progress,
    ProgressLines,
    broker_rows,
    bytes_text,
    copied_bytes,
    duration_text,
    elect_preferred_leaders,
    read_load,
    throttled,
)
from mansio.cli.main import main
from mansio.client.admin.admin import ConfigEntry
from mansio.client.admin.cluster import (
    BrokerStatus,
    ClusterStatus,
    ElectionResult,
    LogDir,
    PartitionStatus,
    Reassignment,
    ReassignmentResult,
)
from mansio.client.types import TopicPartition
from mansio.config.broker_config import FOLLOWER_THROTTLE
from mansio.config.config_def import INT64_MAX
from mansio.errors import (
    BrokerIdNotRegistered,
    ClusterAuthorizationFailed,
    ConcurrentChange,
    DiskFull,
    InvalidReplicaAssignment,
    InvalidRequest,
    MansioError,
    NoReassignmentInProgress,
    RequestTimedOut,
    UnknownTopicOrPartition,
)
from mansio.metadata.move_planner import Move

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from mansio.client.admin.admin import Admin
    from mansio.client.admin.cluster import ClusterAdmin

Key = tuple[str, int]


class FakeCluster:
    """A cluster whose moves end some looks after they began. Counts the copies that each broker has at once."""

    def __init__(self, replicas: Mapping[Key, Sequence[int]], *, looks: int = 2) -> None:
        self.replicas = {key: tuple(there) for key, there in replicas.items()}
        self.looks = looks
        self.ongoing: dict[Key, tuple[tuple[int, ...], int]] = {}
        self.errors: dict[Key, list[MansioError]] = {}
        self.stale: set[Key] = set()
        self.asked: list[Key] = []
        self.copies_max = 0
        self.elected: list[Any] = []
        self.leaders: dict[Key, int] = {}
        self.node_ids: Sequence[int] = (1, 2, 3)
        self.fenced: Sequence[int] = (3,)
        self.dirs: list[LogDir] = []

    async def alter_reassignments(
        self,
        replicas: Mapping[Key, Sequence[int] | None],
        *,
        allow_replication_factor_change: bool = True,
    ) -> list[ReassignmentResult]:
        results = []
        for key, wanted in replicas.items():
            assert wanted is None or not allow_replication_factor_change
            self.asked.append(key)
            error = self.errors[key].pop(0) if self.errors.get(key) else None
            if error is None and wanted is not None:
                self.ongoing[key] = (tuple(wanted), self.looks)
            elif error is None:
                self.ongoing.pop(key, None)
            results.append(ReassignmentResult(*key, error))
        into = Counter(
            node_id
            for key, (wanted, _) in self.ongoing.items()
            for node_id in wanted
            if node_id not in self.replicas.get(key, ())
        )
        self.copies_max = max(self.copies_max, *into.values(), 0)
        return results

    async def list_reassignments(self) -> list[Reassignment]:
        for key, (wanted, looks) in list(self.ongoing.items()):
            if looks:
                self.ongoing[key] = (wanted, looks - 1)
                continue
            del self.ongoing[key]
            if key in self.replicas:
                self.replicas[key] = wanted
        return [
            Reassignment(
                *key,
                (*wanted, *(one for one in self.replicas[key] if one not in wanted)),
                tuple(one for one in wanted if one not in self.replicas[key]),
                tuple(one for one in self.replicas[key] if one not in wanted),
            )
            for key, (wanted, _) in self.ongoing.items()
        ]

    async def partitions(self, topics: Iterable[str] | None = None) -> list[PartitionStatus]:
        found = [
            PartitionStatus(*key, self.leaders.get(key, there[0]), 1, there, there, (), 1, is_internal=False)
            for key, there in self.replicas.items()
            if topics is None or key[0] in topics
        ]
        if topics is not None and not found:
            raise UnknownTopicOrPartition("there is no such topic")
        return found

    async def status(self) -> ClusterStatus:
        brokers = [BrokerStatus(one, "h", 1, None, one == 1, one in self.fenced) for one in self.node_ids]
        return ClusterStatus("id", 1, tuple(brokers))

    async def host_labels(self) -> dict[int, str]:
        return {}

    async def log_dirs(self) -> list[LogDir]:
        return self.dirs

    async def unregister(self, node_id: int) -> None:
        if node_id not in self.node_ids:
            raise BrokerIdNotRegistered(f"there is no broker {node_id}")
        if count := sum(node_id in there for there in self.replicas.values()):
            raise InvalidRequest(f"broker {node_id} has {count} replicas")
        self.node_ids = [one for one in self.node_ids if one != node_id]

    async def elect_leaders(self, kind: str, partitions: Sequence[TopicPartition]) -> list[ElectionResult]:
        self.elected = list(partitions)
        return [ElectionResult(*one, "failed" if one.partition else "elected") for one in partitions]


class Run:
    """A runner on a fake cluster, with what it reported."""

    def __init__(self, cluster: FakeCluster, moves: Sequence[Move], running: Sequence[Move] = ()) -> None:
        self.progress: list[Progress] = []
        self.stalls: list[int] = []
        self.runner = MoveRunner(
            cast("ClusterAdmin", cluster),
            moves,
            running=running,
            on_progress=self.progress.append,
            on_stall=self.stalls.append,
            poll_s=0,
        )

    def outcomes(self) -> dict[Key, MansioError | None]:
        found = asyncio.run(self.runner.run())
        return {(one.move.topic, one.move.partition): one.error for one in found}


def moves_to_three(count: int) -> list[Move]:
    return [Move("t", index, (1, 2), (1, 3), 1, 10) for index in range(count)]


def cluster_of(count: int, **more: Any) -> FakeCluster:
    return FakeCluster({("t", index): (1, 2) for index in range(count)}, **more)


def test_all_moves_end_and_no_broker_copies_more_than_five_at_once() -> None:
    cluster = cluster_of(23)
    run = Run(cluster, moves_to_three(23))
    assert run.outcomes() == dict.fromkeys(cluster.replicas)
    assert set(cluster.replicas.values()) == {(1, 3)}
    assert cluster.copies_max == 5
    assert run.progress[-1] == Progress(23, 23, 0, 230, 230)
    assert run.stalls == []


def test_moves_of_an_earlier_command_count_and_are_waited_for() -> None:
    cluster = cluster_of(12)
    cluster.ongoing = {("t", index): ((1, 3), 6) for index in range(4)}
    run = Run(cluster, moves_to_three(12)[4:], running=moves_to_three(4))
    assert len(run.outcomes()) == 12
    assert cluster.copies_max == 5
    assert [key[1] for key in cluster.asked] == list(range(4, 12)), "what runs is not begun again"


def test_a_partition_that_another_command_moves_stays_with_it_and_a_lost_response_is_noticed() -> None:
    cluster = cluster_of(8, looks=4)
    run = Run(cluster, moves_to_three(8))
    cluster.ongoing = {("t", 6): ((4, 2), 50), ("t", 7): ((1, 3), 50)}
    outcomes = run.outcomes()
    assert isinstance(outcomes.pop(("t", 6)), ConcurrentChange)
    assert set(outcomes.values()) == {None}
    assert {("t", 6), ("t", 7)}.isdisjoint(cluster.asked)


def test_a_retriable_refusal_is_repeated_and_another_one_reported() -> None:
    cluster = cluster_of(3)
    cluster.errors = {
        ("t", 0): [ConcurrentChange("changed meanwhile"), RequestTimedOut("slow")],
        ("t", 1): [InvalidReplicaAssignment("no such broker")],
    }
    outcomes = Run(cluster, moves_to_three(3)).outcomes()
    assert outcomes[("t", 0)] is None
    assert isinstance(outcomes[("t", 1)], InvalidReplicaAssignment)
    assert outcomes[("t", 2)] is None
    assert Counter(cluster.asked) == {("t", 0): 3, ("t", 1): 1, ("t", 2): 1}


def test_a_refusal_that_never_ends_is_reported() -> None:
    cluster = cluster_of(1)
    cluster.errors = {("t", 0): [RequestTimedOut("slow")] * 200}
    outcomes = Run(cluster, moves_to_three(1)).outcomes()
    assert isinstance(outcomes[("t", 0)], RequestTimedOut)
    assert len(cluster.asked) == cluster_moves.ATTEMPTS_MAX


def test_a_cancelled_move_and_a_deleted_topic_are_reported() -> None:
    cluster = cluster_of(1)
    cluster.replicas["gone", 0] = (1, 2)
    run = Run(cluster, [*moves_to_three(1), Move("gone", 0, (1, 2), (1, 3), 1, 10)])

    async def interfere() -> list[Any]:
        running = asyncio.create_task(run.runner.run())
        await asyncio.sleep(0)  # both moves begin without a wait
        assert len(cluster.ongoing) == 2
        cluster.ongoing.clear()
        del cluster.replicas["gone", 0]
        return await running

    outcomes = {one.move.topic: one.error for one in asyncio.run(interfere())}
    assert isinstance(outcomes["gone"], UnknownTopicOrPartition)
    assert isinstance(outcomes["t"], NoReassignmentInProgress)
    assert "[1, 2], not [1, 3]" in outcomes["t"].message


def test_a_move_that_does_not_end_is_reported_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_moves, "STALL_S", -1.0)
    run = Run(cluster_of(1, looks=10), moves_to_three(1))
    run.outcomes()
    assert set(run.stalls) == {1}


def test_an_interrupted_run_leaves_what_began_and_begins_no_more() -> None:
    cluster = cluster_of(9, looks=1_000)
    run = Run(cluster, moves_to_three(9))

    async def interrupt() -> None:
        running = asyncio.create_task(run.runner.run())
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(interrupt())
    assert len(cluster.ongoing) == run.runner.running == 5


# -- the commands --------


class FakeAdmin:
    """Administration of a fake cluster; with the throttles of its brokers, now and all that were set."""

    def __init__(self, cluster: FakeCluster | None = None, *, failing: int | None = None) -> None:
        self.cluster = FakeCluster({}) if cluster is None else cluster
        self.throttles: dict[int, str] = {}
        self.were_set: dict[int, str] = {}
        self.failing = failing

    async def describe_config(self, node_id: int, *, kind: str) -> dict[str, ConfigEntry]:
        assert kind == "broker"
        source = "broker" if node_id in self.throttles else "default"
        value = self.throttles.get(node_id, str(INT64_MAX))
        return {FOLLOWER_THROTTLE: ConfigEntry(FOLLOWER_THROTTLE, value, source, source == "default")}

    async def alter_broker_config(self, node_id: int, changes: Mapping[str, str | None]) -> None:
        ((name, value),) = changes.items()
        assert name == FOLLOWER_THROTTLE
        if value is not None:
            self.throttles[node_id] = self.were_set[node_id] = value
        elif node_id == self.failing:
            raise RequestTimedOut("no answer")
        else:
            self.throttles.pop(node_id, None)


class Commands:
    """Runs commands on a fake cluster."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.admin = FakeAdmin()
        self.throttles: dict[int, str] = {}
        """What brokers have when a command begins."""
        self.errors = ""

    def __call__(self, cluster: FakeCluster, *arguments: str, code: int = 0) -> str:
        self.admin = FakeAdmin(cluster)
        self.admin.throttles = dict(self.throttles)

        @asynccontextmanager
        async def connect(_bootstrap_servers: str) -> AsyncIterator[Any]:
            yield SimpleNamespace(admin=self.admin)

        self._monkeypatch.setattr(commands, "connect", connect)
        with pytest.raises(SystemExit) as ended:
            main(["cluster", *arguments])
        output, self.errors = self._capsys.readouterr()
        assert ended.value.code == code, self.errors
        return output

    def json(self, cluster: FakeCluster, *arguments: str, **more: Any) -> Any:
        return json.loads(self(cluster, *arguments, "--output", "json", **more))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(monkeypatch, capsys)


def joined(count: int = 8, **more: Any) -> FakeCluster:
    """A cluster of three brokers of which the third one has nothing, and each replica 1000 bytes."""
    cluster = cluster_of(count, looks=0)
    cluster.fenced = ()
    sizes = {TopicPartition(*key): 1_000 for key in cluster.replicas}
    cluster.dirs = [
        LogDir(1, sizes, 100_000, 50_000),
        LogDir(2, sizes, 100_000, 50_000),
        LogDir(3, {}, 100_000, more.get("free_bytes", 50_000)),
    ]
    return cluster


def test_a_rebalance_shows_its_plan_and_executes_it(command: Commands) -> None:
    cluster = joined()
    output = command(cluster, "rebalance", "--yes", "--throttle", "100")
    assert output.splitlines()[0].split() == (
        ["BROKER", "REPLICAS", "REPLICAS", "AFTER", "BYTES", "BYTES", "AFTER", "LEADS", "LEADS", "AFTER"]
    )
    assert output.splitlines()[3].split() == ["3", "0", "5", "0", "5000", "0", "3"]
    assert "5.0 kB to copy" in command.errors
    assert "at 100 B/s about 50 s" in command.errors
    assert "5 of them" not in command.errors
    numbers = Counter(node_id for there in cluster.replicas.values() for node_id in there)
    assert sorted(numbers.values()) == [5, 5, 6]
    assert command.admin.were_set == {3: "100"}
    assert command.admin.throttles == {}
    assert command(cluster, "rebalance", "--yes") == ""
    assert "nothing to move" in command.errors


def test_a_plan_that_is_not_confirmed_changes_nothing(command: Commands) -> None:
    cluster = joined()
    before = dict(cluster.replicas)
    done = command.json(cluster, "rebalance", "--dry-run", "--throttle", "100")
    assert len(done["planned"]) >= done["copied_bytes"] // 1_000 == 5
    assert (done["seconds"], done["executed"]) == (50.0, [])
    assert "t" in command(cluster, "rebalance", "--dry-run")
    command(cluster, "rebalance", code=2)
    assert "--yes" in command.errors
    assert (cluster.replicas, cluster.asked) == (before, [])


def test_a_plan_that_does_not_fit_on_a_disk_is_refused(command: Commands) -> None:
    cluster = joined(free_bytes=4_500)
    command(cluster, "rebalance", "--yes", code=1)
    assert "broker 3 has 4.5 kB free, and would get 5.0 kB: nothing was changed" in command.errors
    assert cluster.asked == []


def test_a_drain_moves_what_the_broker_gets_meanwhile(
    command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = joined()
    begin = cluster.alter_reassignments

    async def create_a_topic(
        replicas: Mapping[Key, Sequence[int] | None], **options: Any
    ) -> list[ReassignmentResult]:
        cluster.replicas.setdefault(("later", 0), (2, 1))
        return await begin(replicas, **options)

    monkeypatch.setattr(cluster, "alter_reassignments", create_a_topic)
    done = command.json(cluster, "drain", "2", "--yes")
    assert len(done["planned"]) == 8
    assert len(done["executed"]) == 9
    assert not any(2 in there for there in cluster.replicas.values())
    assert command.json(cluster, "drain", "2", "--yes")["executed"] == []


def test_a_drain_that_leaves_replicas_fails(command: Commands) -> None:
    cluster = joined()
    cluster.leaders = {("t", 3): -1}
    command(cluster, "drain", "2", "--yes", code=1)
    assert "1 partition without a leader cannot be moved" in command.errors
    assert "broker 2 still has 1 replica, the first of t-3" in command.errors
    assert sum(2 in there for there in cluster.replicas.values()) == 1


def test_a_replacement_fails_where_a_move_fails(command: Commands) -> None:
    cluster = joined()
    cluster.errors = {("t", 0): [InvalidReplicaAssignment("no such broker")]}
    done = command.json(cluster, "replace", "2", "3", "--yes", code=1)
    errors = {row["partition"]: row["error"] for row in done["executed"]}
    assert errors == {**dict.fromkeys(range(8)), 0: "no such broker"}
    assert "1 of 8 moves failed; run the command again" in command.errors
    assert cluster.replicas["t", 1] == (1, 3)


def test_moves_are_listed_and_cancelled(command: Commands) -> None:
    cluster = joined()
    cluster.ongoing = {("t", 0): ((1, 3), 100), ("t", 1): ((1, 3), 100)}
    cluster.dirs[2] = LogDir(3, {TopicPartition("t", 0): 400})
    rows = command.json(cluster, "moves")
    assert rows[0] == {
        "topic": "t",
        "partition": 0,
        "replicas": [1, 3],
        "adding": [3],
        "removing": [2],
        "copied_bytes": 400,
        "total_bytes": 1_000,
        "throttle": None,
    }
    assert [row["copied_bytes"] for row in rows] == [400, 0]
    assert command.json(cluster, "cancel-moves", "--topic", "other", "--yes") == []
    cluster.errors = {("t", 0): [NoReassignmentInProgress("ended")]}
    rows = command.json(cluster, "cancel-moves", "--yes")
    assert [(row["partition"], row["outcome"]) for row in rows] == [(0, "ended before"), (1, "cancelled")]
    cluster.ongoing = {("t", 0): ((1, 3), 100)}
    cluster.errors = {("t", 0): [InvalidReplicaAssignment("none is in sync")]}
    command(cluster, "cancel-moves", "--yes", code=1)
    assert "1 of 1 move could not be ended" in command.errors


# -- what surrounds a run --------


@pytest.mark.parametrize("running", [0, 3])
@pytest.mark.parametrize("error", [asyncio.CancelledError(), RequestTimedOut("slow"), None])
def test_the_throttle_is_there_as_long_as_moves_run_however_the_command_ends(
    error: BaseException | None, running: int
) -> None:
    admin = FakeAdmin()

    async def run() -> None:
        async with throttled(cast("Admin", admin), (2, 3), 1_000, running=lambda: running):
            assert admin.throttles == {2: "1000", 3: "1000"}
            if error is not None:
                raise error

    if error is None:
        asyncio.run(run())
    else:
        with pytest.raises(type(error)):
            asyncio.run(run())
    assert admin.throttles == ({2: "1000", 3: "1000"} if error is not None and running else {})


def test_a_throttle_that_stays_is_named_and_the_others_are_removed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    admin = FakeAdmin(failing=2)

    async def run() -> None:
        async with throttled(cast("Admin", admin), (2, 3), 1_000, running=lambda: 0):
            pass
        async with throttled(cast("Admin", admin), (4,), None, running=lambda: 0):
            assert 4 not in admin.throttles

    asyncio.run(run())
    assert admin.throttles == {2: "1000"}
    assert "of broker 2: no answer" in capsys.readouterr().err


def test_a_throttle_stays_while_another_command_moves_partitions(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = cluster_of(1)
    cluster.ongoing = {("t", 0): ((1, 3), 100)}
    admin = FakeAdmin(cluster)

    async def run() -> None:
        async with throttled(cast("Admin", admin), (2,), 1_000, running=lambda: 0):
            pass

    asyncio.run(run())
    assert admin.throttles == {2: "1000"}
    assert "other moves are running; the throttle stays" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [("moves",), ("rebalance", "--yes"), ("drain", "2", "--yes"), ("cancel-moves", "--yes")]
)
def test_the_throttle_of_an_interrupted_command_is_removed_when_nothing_runs_any_more(
    command: Commands, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(cluster_moves, "THROTTLE_LOOK_S", 0.0)
    command.throttles = {3: "1000"}
    cluster = joined()
    if arguments[0] in ("moves", "cancel-moves"):
        cluster.ongoing = {("t", 0): ((1, 3), 1_000)}
        assert command.json(cluster, "moves")[0]["throttle"] == 1_000
        assert command.admin.throttles == {3: "1000"}
    if arguments[0] == "moves":
        cluster.ongoing = {}
    command(cluster, *arguments)
    assert command.admin.throttles == {}
    if arguments[0] in ("moves", "cancel-moves"):
        assert "no moves are running; the throttle of 1.0 kB/s (broker 3) was removed" in command.errors


def test_a_move_waits_for_room_on_the_disk_and_fails_if_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_moves, "MEASURE_S", -1.0)
    cluster = cluster_of(3)
    cluster.dirs = [LogDir(3, {}, 100, 25)]
    ended: list[int] = []

    async def log_dirs() -> list[LogDir]:
        there = {TopicPartition(*key): 10 for key, replicas in cluster.replicas.items() if 3 in replicas}
        ended.append(len(there))
        return [LogDir(3, there, 100, 25 - 10 * len(there))]

    monkeypatch.setattr(cluster, "log_dirs", log_dirs)
    run = Run(cluster, moves_to_three(3))
    outcomes = run.outcomes()
    assert [error is None for error in outcomes.values()] == [True, True, False]
    assert cluster.copies_max == 2
    assert isinstance(outcomes["t", 2], DiskFull)
    assert "broker 3 has 5 B free" in outcomes["t", 2].message
    assert ended.count(2) >= cluster_moves.LOOKS_WITHOUT_ROOM_MAX, "former replicas may still be deleted"


def test_progress_counts_what_the_running_moves_have_copied() -> None:
    cluster = cluster_of(2)
    cluster.dirs = [LogDir(3, {TopicPartition("t", 0): 7, TopicPartition("t", 1): 99})]
    run = Run(cluster, moves_to_three(2))
    run.outcomes()
    assert run.progress[0].bytes_done == 7 + 10


def test_a_broker_that_is_gone_is_drained_and_a_topic_deleted_meanwhile_is_no_failure(
    command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = joined()
    cluster.node_ids = (1, 3)
    cluster.leaders = dict.fromkeys(cluster.replicas, 1)
    cluster.replicas["gone", 0] = (1, 2)
    begin = cluster.alter_reassignments

    async def delete_a_topic(
        replicas: Mapping[Key, Sequence[int] | None], **options: Any
    ) -> list[ReassignmentResult]:
        results = await begin(replicas, **options)
        cluster.replicas.pop(("gone", 0), None)
        return results

    monkeypatch.setattr(cluster, "alter_reassignments", delete_a_topic)
    done = command.json(cluster, "drain", "2", "--yes")
    assert {row["topic"] for row in done["executed"] if row["error"]} == {"gone"}
    assert "stop it, then mansio cluster remove 2" in command.errors


def test_a_broker_is_removed_once_and_a_refusal_is_one_line(command: Commands) -> None:
    cluster = joined()
    command(cluster, "remove", "3")
    assert "broker 3 was removed" in command.errors
    command(cluster, "remove", "3")
    assert "broker 3 is not registered" in command.errors
    command(cluster, "remove", "2", code=1)
    assert command.errors == "mansio: broker 2 has 8 replicas\n"


def test_a_plan_is_made_from_the_state_after_the_running_moves() -> None:
    cluster = cluster_of(2, looks=100)
    cluster.ongoing = {("t", 1): ((1, 3), 100)}
    key = TopicPartition("t", 0)
    cluster.dirs = [
        LogDir(1, {key: 100, TopicPartition("t", 1): 40}, 1_000, 500),
        LogDir(2, {key: 300}, error=None),
        LogDir(3, {TopicPartition("t", 1): 15}, 1_000, 700),
    ]
    load = asyncio.run(read_load(cast("ClusterAdmin", cluster)))
    assert [(one.node_id, one.is_usable) for one in load.brokers] == [(1, True), (2, True), (3, False)]
    assert [(one.replicas, one.size_bytes, one.is_moving) for one in load.partitions] == [
        ((1, 2), 100, False),  # of the leader, whatever others have
        ((1, 3), 40, True),
    ]
    assert load.running == [Move("t", 1, (1, 2), (1, 3), 1, 40)]
    assert load.free_bytes == {1: 500, 3: 675}  # 25 of 40 bytes are still to be copied
    (move,) = asyncio.run(cluster.list_reassignments())
    assert copied_bytes(move, cluster.dirs) == 15
    rows = broker_rows(load, [Move("t", 0, (1, 2), (2, 3), 1, 100)])
    assert [(row["broker"], row["replicas"], row["replicas_after"], row["leads_after"]) for row in rows] == [
        (1, 2, 1, 1),
        (2, 1, 1, 1),
        (3, 1, 2, 0),
    ]
    assert [(row["bytes"], row["bytes_after"]) for row in rows] == [(140, 40), (100, 100), (40, 140)]


def test_a_move_that_ends_while_the_cluster_is_read_changes_no_number_of_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = cluster_of(1)
    move = Reassignment("t", 0, (1, 3, 2), (3,), (2,))
    answers = iter([[move], []])
    cluster.replicas["t", 0] = move.replicas
    cluster.dirs = [LogDir(1, {TopicPartition("t", 0): 5})]

    async def list_reassignments() -> list[Reassignment]:
        return next(answers)

    monkeypatch.setattr(cluster, "list_reassignments", list_reassignments)
    (partition,) = asyncio.run(read_load(cast("ClusterAdmin", cluster))).partitions
    assert (partition.replicas, partition.is_moving) == ((1, 3), True)


def test_sizes_that_may_not_be_read_are_an_error() -> None:
    cluster = cluster_of(1)
    cluster.dirs = [LogDir(1, {}, error=ClusterAuthorizationFailed("not allowed")), LogDir(2, {})]
    with pytest.raises(ClusterAuthorizationFailed):
        asyncio.run(read_load(cast("ClusterAdmin", cluster)))
    cluster.dirs[1] = LogDir(2, {TopicPartition("t", 0): 5})
    assert asyncio.run(read_load(cast("ClusterAdmin", cluster))).partitions[0].size_bytes == 5


def test_preferred_leaders_are_elected_where_others_lead() -> None:
    cluster = cluster_of(3)
    cluster.leaders = {("t", 0): 2, ("t", 1): 2}
    moves = [Move("t", index, (2, 1), (1, 2), 2, 0) for index in range(3)]
    assert asyncio.run(elect_preferred_leaders(cast("ClusterAdmin", cluster), moves)) == 1
    assert cluster.elected == [("t", 0), ("t", 1)]


def test_progress_is_a_line_now_and_then_and_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 1.0, 11.0, 12.0])
    lines = ProgressLines(clock=lambda: next(times))
    for done in range(3):
        lines.show(Progress(3, done, 1, 3_000_000, done * 1_000_000))
    lines.show(Progress(3, 3, 0, 3_000_000, 3_000_000))
    assert capsys.readouterr().err.splitlines() == [
        "0 of 3 moves, 0 B of 3.0 MB; 1 running",
        "2 of 3 moves, 2.0 MB of 3.0 MB; 1 running",
        "3 of 3 moves, 3.0 MB of 3.0 MB; 0 running",
    ]


def test_sizes_and_durations_for_people() -> None:
    assert [bytes_text(size) for size in (0, 999, 1_500, 20e9, 3e15)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "20.0 GB",
        "3,000.0 TB",
    ]
    assert [duration_text(seconds) for seconds in (0.1, 40, 720, 11_100)] == [
        "1 s",
        "40 s",
        "12 min",
        "3 h 5 min",
    ]
