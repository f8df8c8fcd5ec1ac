"""Moves of partitions, as the commands of `mansio cluster` plan and execute them.

Invariants:
* The cluster keeps the moves that have begun, and nothing else is stored: a command that is run again after an
  interruption waits for those, and makes a new plan for the rest.
* At most `MOVES_PER_BROKER_MAX` replicas are copied to a broker at once, and from a leader, moves of earlier commands
  included.
* A move begins only while the disks of its added replicas have room for it.
* The throttle is set before the first move begins, and removed when no moves are running any more. A command that is
  interrupted before leaves it in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.config.broker_config import FOLLOWER_THROTTLE
from mansio.errors import (
    ConcurrentChange,
    DiskFull,
    MansioError,
    NoReassignmentInProgress,
    UnknownTopicOrPartition,
)
from mansio.metadata.move_planner import Move, PlannedBroker, PlannedPartition, startable_moves
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from mansio.client.admin.admin import Admin, ConfigEntry
    from mansio.client.admin.cluster import ClusterAdmin, LogDir, PartitionStatus, Reassignment

POLL_S: Final = 0.5
"""Pause between two looks at the moves that are running."""
UNSEEN_LOOKS_MAX: Final = 20
"""Looks after which a move that is not running, and whose partition has other replicas, counts as ended by another
client."""
ATTEMPTS_MAX: Final = 120
"""Attempts to begin a move while the errors are retriable, for example because a broker is being restarted."""
MEASURE_S: Final = 10.0
"""Age at which the sizes of replicas and the free space are read again."""
LOOKS_WITHOUT_ROOM_MAX: Final = 3
"""Measurements after which moves end for which there is no room, although none runs: brokers delete former replicas in
the meantime."""
SETTINGS_S_MAX: Final = 5.0
"""Time within which a broker must return its settings."""
BROKER_SOURCE: Final = "broker"
"""Source of a setting that was set for one broker at run time."""
THROTTLE_LOOK_S: Final = 1.0
"""Pause between two looks that must find no moves before a throttle of an earlier command is removed: another command
may just have set it."""
STALL_S: Final = 300.0
"""Time without a finished move after which the command says so."""
PROGRESS_LINE_S: Final = 10.0
"""Time between two lines of progress where standard error is no terminal."""

Key = tuple[str, int]
"""Topic and partition index."""


class ClusterLoad(NamedTuple):
    """What a plan of moves is made from."""

    brokers: list[PlannedBroker]
    partitions: list[PlannedPartition]
    running: list[Move]
    """The moves that have begun. The partitions have the replicas after them."""
    free_bytes: dict[int, int]
    """Free space of the brokers that report it, less what the running moves have to copy yet."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the moves of a command are."""

    moves: int
    moves_done: int
    running: int
    bytes: int
    bytes_done: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one move: it is done if `error` is None."""

    move: Move
    error: MansioError | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the partition is there and does not have the planned replicas."""
        return self.error is not None and not isinstance(self.error, UnknownTopicOrPartition)


async def read_load(cluster: ClusterAdmin) -> ClusterLoad:
    """Read the brokers, the partitions with their sizes, and the ongoing moves. Raises the error of a broker that does
    not report the sizes of its partitions, if no other replica of one of them is known."""
    status = await cluster.status()
    # Read before and after the partitions: one that begins or ends to move meanwhile has replicas of both lists.
    ongoing = {(one.topic, one.partition): one for one in await cluster.list_reassignments()}
    partitions = await cluster.partitions()
    ongoing |= {(one.topic, one.partition): one for one in await cluster.list_reassignments()}
    dirs = {one.node_id: one for one in await cluster.log_dirs()}
    free_bytes = {one.node_id: one.usable_bytes for one in dirs.values() if one.usable_bytes is not None}
    planned, running = [], []
    for one in partitions:
        key = (one.topic, one.partition)
        size_bytes = _size_bytes(one, dirs)
        move = ongoing.get(key)
        planned.append(
            PlannedPartition(
                one.topic,
                one.partition,
                one.replicas if move is None else move.target,
                size_bytes,
                one.leader,
                is_moving=move is not None,
            )
        )
        if move is not None:
            running.append(_running_move(move, one.leader, size_bytes))
            for node_id in move.adding:
                if node_id in free_bytes:
                    free_bytes[node_id] -= max(0, size_bytes - copied_bytes(move, [dirs[node_id]]))
    labels = await cluster.host_labels()
    brokers = [
        PlannedBroker(one.node_id, one.rack, not one.is_fenced, labels.get(one.node_id, ""))
        for one in status.brokers
    ]
    return ClusterLoad(brokers, planned, running, free_bytes)


def _size_bytes(partition: PartitionStatus, dirs: dict[int, LogDir]) -> int:
    """Return the size of the leader's replica, or of the largest one that is known."""
    key = (partition.topic, partition.partition)
    sizes = {
        node_id: dirs[node_id].replica_bytes[key]  # type: ignore[index]  # equal to a `TopicPartition`
        for node_id in partition.replicas
        if node_id in dirs and key in dirs[node_id].replica_bytes
    }
    if sizes:
        return sizes.get(partition.leader, max(sizes.values()))
    for node_id in partition.replicas:
        if node_id in dirs and (error := dirs[node_id].error) is not None:
            raise copied(error)
    return 0


def _running_move(move: Reassignment, leader: int, size_bytes: int) -> Move:
    before = tuple(node_id for node_id in move.replicas if node_id not in move.adding)
    return Move(move.topic, move.partition, before, move.target, leader, len(move.adding) * size_bytes)


def copied_bytes(move: Reassignment, dirs: Iterable[LogDir]) -> int:
    """Return the number of bytes that the added replicas of a move have."""
    return sum(
        one.replica_bytes.get((move.topic, move.partition), 0)  # type: ignore[call-overload]
        for one in dirs
        if one.node_id in move.adding
    )


def broker_rows(load: ClusterLoad, moves: Sequence[Move]) -> list[dict[str, Any]]:
    """Return, for each broker, its replicas, bytes and preferred leaderships before and after a plan."""
    after = {(move.topic, move.partition): move.after for move in moves}
    totals: dict[str, Counter[int]] = {
        name: Counter()
        for name in ("replicas", "bytes", "leads", "replicas_after", "bytes_after", "leads_after")
    }
    for one in load.partitions:
        for suffix, replicas in (
            ("", one.replicas),
            ("_after", after.get((one.topic, one.partition), one.replicas)),
        ):
            totals[f"leads{suffix}"][replicas[0]] += 1
            for node_id in replicas:
                totals[f"replicas{suffix}"][node_id] += 1
                totals[f"bytes{suffix}"][node_id] += one.size_bytes
    known = {one.node_id for one in load.brokers}
    return [
        {"broker": node_id, **{name: counter[node_id] for name, counter in totals.items()}}
        for node_id in sorted(known.union(totals["replicas"], totals["replicas_after"]))
    ]


@contextlib.asynccontextmanager
async def throttled(
    admin: Admin, brokers: Iterable[int], bytes_per_second: int | None, *, running: Callable[[], int]
) -> AsyncIterator[None]:
    """Limit the rate at which each of the brokers copies added replicas (None: leave it as it is), until the context
    ends. If it ends with an exception while `running` moves run, the throttle stays. Otherwise it is removed with those
    of earlier commands, unless another command moves partitions."""
    limited: list[int] = []
    try:
        if bytes_per_second is not None:
            for node_id in brokers:
                limited.append(node_id)
                await admin.alter_broker_config(node_id, {FOLLOWER_THROTTLE: str(bytes_per_second)})
        yield
    except BaseException:
        if not running():
            await remove_throttles(admin, limited)
        raise
    throttles = {*limited, *await read_throttles(admin)}
    if throttles and await admin.cluster.list_reassignments():
        print(
            "mansio: other moves are running; the throttle stays until mansio cluster moves finds none",
            file=sys.stderr,
            flush=True,
        )
    else:
        await remove_throttles(admin, throttles)


async def read_throttles(admin: Admin) -> dict[int, int]:
    """Return the throttles, in bytes per second, of the live brokers that have one of their own."""
    status = await admin.cluster.status()
    live = [one.node_id for one in status.brokers if not one.is_fenced]
    found = {}
    for node_id, settings in zip(
        live, await asyncio.gather(*(_settings(admin, node_id) for node_id in live)), strict=True
    ):
        entry = settings.get(FOLLOWER_THROTTLE)
        if entry is not None and entry.source == BROKER_SOURCE and entry.value is not None:
            found[node_id] = int(entry.value)
    return found


async def _settings(admin: Admin, node_id: int) -> Mapping[str, ConfigEntry]:
    """Return the settings of a broker; none if the user may not read them, or the broker does not answer."""
    try:
        async with asyncio.timeout(SETTINGS_S_MAX):
            return await admin.describe_config(node_id, kind="broker")
    except (TimeoutError, MansioError):
        return {}


async def remove_throttles(admin: Admin, brokers: Iterable[int]) -> None:
    """Remove the throttles of brokers; print which ones could not be removed."""
    failures = []
    for node_id in sorted(brokers):
        try:
            await admin.alter_broker_config(node_id, {FOLLOWER_THROTTLE: None})
        except MansioError as error:
            failures.append(f"of broker {node_id}: {error.message}")
    if failures:
        print(
            f"mansio: the throttle was not removed {'; '.join(failures)}; remove it with mansio cluster settings"
            f" --broker N --unset {FOLLOWER_THROTTLE}",
            file=sys.stderr,
            flush=True,
        )


async def remove_unused_throttles(admin: Admin) -> None:
    """Remove the throttles that earlier commands left for their moves, if no moves are running, and say so."""
    if not (throttles := await read_throttles(admin)) or await admin.cluster.list_reassignments():
        return
    await asyncio.sleep(THROTTLE_LOOK_S)
    if await admin.cluster.list_reassignments():
        return
    await remove_throttles(admin, throttles)
    print(
        f"mansio: no moves are running; the throttle of {throttles_text(throttles)} was removed",
        file=sys.stderr,
        flush=True,
    )


def throttles_text(throttles: Mapping[int, int]) -> str:
    """Return throttles for people: `20.0 MB/s (brokers 3, 4)`."""
    by_rate: dict[int, list[int]] = {}
    for node_id, rate in sorted(throttles.items()):
        by_rate.setdefault(rate, []).append(node_id)
    return ", ".join(
        f"{bytes_text(rate)}/s (broker{'s' if len(node_ids) > 1 else ''} {', '.join(map(str, node_ids))})"
        for rate, node_ids in by_rate.items()
    )


class MoveRunner:
    """Begins moves as brokers have room for them, and waits until all have ended."""

    def __init__(
        self,
        cluster: ClusterAdmin,
        moves: Sequence[Move],
        *,
        running: Sequence[Move] = (),
        on_progress: Callable[[Progress], None],
        on_stall: Callable[[int], None],
        poll_s: float = POLL_S,
    ) -> None:
        """Prepare to execute `moves`, and to wait for those that are `running` already. `on_stall` is called with the
        number of running moves when none has ended for `STALL_S`."""
        self._cluster = cluster
        self._pending = list(moves)
        self._running = {(move.topic, move.partition): move for move in running}
        self._asked: dict[Key, Move] = {}
        """The moves of the request that is being sent: they may have begun."""
        self._dirs: dict[int, LogDir] = {}
        """Sizes of replicas and free space, as they were read last."""
        self._measured_at = float("-inf")
        self._reserved: dict[Key, Move] = {}
        """The moves that have run since then."""
        self._looks_without_room = 0
        self._unseen: Counter[Key] = Counter()
        self._attempts: Counter[Key] = Counter()
        self._on_progress = on_progress
        self._on_stall = on_stall
        self._poll_s = poll_s
        self._moves = len(moves) + len(running)
        self._bytes = sum(move.copied_bytes for move in (*moves, *running))
        self.outcomes: list[Outcome] = []

    @property
    def running(self) -> int:
        """Number of moves that have begun, or may have begun, and not ended."""
        return len({**self._running, **self._asked})

    async def run(self) -> list[Outcome]:
        """Execute the moves; return the outcome of each, in the order in which they ended."""
        clock = asyncio.get_running_loop().time
        last_end = clock()
        while self._pending or self._running:
            ended = len(self.outcomes)
            if clock() - self._measured_at >= MEASURE_S:
                await self._measure()
                self._measured_at = clock()
            await self._begin()
            await self._collect()
            self._on_progress(self._progress())
            if len(self.outcomes) > ended:
                last_end = clock()
                continue  # brokers have room for others
            if clock() - last_end > STALL_S:
                self._on_stall(len(self._running))
                last_end = clock()
            await asyncio.sleep(self._poll_s)
        return self.outcomes

    async def _measure(self) -> None:
        """Read the sizes of replicas and the free space of brokers."""
        if any(move.added for move in (*self._pending, *self._running.values())):
            self._dirs = {one.node_id: one for one in await self._cluster.log_dirs()}
            self._reserved = dict(self._running)
            self._looks_without_room += 1

    def _free_bytes(self) -> dict[int, int]:
        """Return the free space of brokers that report it, less what the running moves had to copy yet."""
        free_bytes = {
            node_id: one.usable_bytes for node_id, one in self._dirs.items() if one.usable_bytes is not None
        }
        for move in self._reserved.values():
            self._reserve(move, free_bytes)
        return free_bytes

    def _reserve(self, move: Move, free_bytes: dict[int, int]) -> None:
        for node_id in move.added:
            if node_id in free_bytes:
                free_bytes[node_id] -= self._left_bytes(move, node_id)

    def _full_broker(self, move: Move, free_bytes: Mapping[int, int]) -> int | None:
        """Return a broker that has no room for a move; None if all have."""
        for node_id in move.added:
            if node_id in free_bytes and self._left_bytes(move, node_id) > max(0, free_bytes[node_id]):
                return node_id
        return None

    def _left_bytes(self, move: Move, node_id: int) -> int:
        """Return the number of bytes that a move had to copy to a broker when sizes were read."""
        return max(0, move.copied_bytes // len(move.added) - self._there(move, node_id))

    def _there(self, move: Move, node_id: int) -> int:
        found = self._dirs.get(node_id)
        key = (move.topic, move.partition)
        return 0 if found is None else found.replica_bytes.get(key, 0)  # type: ignore[call-overload]

    def _startable(self) -> dict[Key, Move]:
        """Return the pending moves that can begin now. If none can and none runs, because disks have no room, all of
        those end with an error."""
        free_bytes = self._free_bytes()
        fitting, refused = [], []
        for move in self._pending:
            full = self._full_broker(move, free_bytes)
            if full is None:
                fitting.append(move)
            else:
                refused.append((move, f"broker {full} has {bytes_text(max(0, free_bytes[full]))} free"))
        starting = {}
        for move in startable_moves(fitting, self._running.values()):
            if self._full_broker(move, free_bytes) is None:
                starting[move.topic, move.partition] = move
                self._reserve(move, free_bytes)
        if not refused or starting or self._running:
            self._looks_without_room = 0
        elif self._looks_without_room >= LOOKS_WITHOUT_ROOM_MAX:
            self.outcomes += [
                Outcome(move, DiskFull(f"{text}, too little for the partition")) for move, text in refused
            ]
            self._pending = fitting
        return starting

    async def _begin(self) -> None:
        starting = self._startable()
        if not starting:
            return
        self._asked = dict(starting)
        results = await self._cluster.alter_reassignments(
            {key: move.after for key, move in starting.items()},
            allow_replication_factor_change=False,  # no plan changes it, not even one from a list that is out of date
        )
        self._asked = {}
        for result in results:
            key = (result.topic, result.partition)
            self._attempts[key] += 1
            if result.error is None:
                self._running[key] = self._reserved[key] = starting[key]
            elif result.error.retriable and self._attempts[key] < ATTEMPTS_MAX:
                del starting[key]
            else:
                self.outcomes.append(Outcome(starting[key], result.error))
        self._pending = [move for move in self._pending if (move.topic, move.partition) not in starting]

    async def _collect(self) -> None:
        """Record the outcomes of the moves that are not running any more, and of those that another command moves."""
        ongoing = {(one.topic, one.partition): one.target for one in await self._cluster.list_reassignments()}
        self._compare_pending(ongoing)
        ended = [key for key in self._running if key not in ongoing]
        replicas = await self._replicas({topic for topic, _ in ended})
        for key in ended:
            there = replicas.get(key)
            move = self._running[key]
            if isinstance(there, MansioError) or there is None:
                error = there or UnknownTopicOrPartition(f"there is no partition {key[0]}-{key[1]}")
            elif there == move.after:
                error = None
            elif (unseen := self._unseen[key] + 1) < UNSEEN_LOOKS_MAX:
                self._unseen[key] = unseen  # the broker that was asked may not know it yet
                continue
            else:
                error = NoReassignmentInProgress(
                    f"another client ended the move: the replicas are {list(there)}, not {list(move.after)}"
                )
            del self._running[key]
            self.outcomes.append(Outcome(move, error))

    def _compare_pending(self, ongoing: Mapping[Key, tuple[int, ...]]) -> None:
        """Take pending moves out that are running: because the response to their request was lost, or because another
        command has moved their partition to other replicas, which stays so."""
        pending = []
        for move in self._pending:
            key = (move.topic, move.partition)
            target = ongoing.get(key)
            if target is None:
                pending.append(move)
            elif target == move.after:
                self._running[key] = self._reserved[key] = move
            else:
                error = ConcurrentChange(f"another command moves the partition, to {list(target)}")
                self.outcomes.append(Outcome(move, error))
        self._pending = pending

    async def _replicas(self, topics: set[str]) -> dict[Key, tuple[int, ...] | MansioError]:
        """Return the replicas of each partition of `topics`; of a topic that was deleted, the error."""
        found: dict[Key, tuple[int, ...] | MansioError] = {}
        for topic in sorted(topics):
            try:
                partitions = await self._cluster.partitions([topic])
            except UnknownTopicOrPartition as error:
                gone = without_traceback(error)
                found.update({key: gone for key in self._running if key[0] == topic})
            else:
                found.update({(topic, one.partition): one.replicas for one in partitions})
        return found

    def _progress(self) -> Progress:
        return Progress(
            self._moves,
            len(self.outcomes),
            len(self._running),
            self._bytes,
            sum(outcome.move.copied_bytes for outcome in self.outcomes)
            + sum(
                min(move.copied_bytes, sum(self._there(move, node_id) for node_id in move.added))
                for move in self._running.values()
            ),
        )


async def elect_preferred_leaders(cluster: ClusterAdmin, moves: Iterable[Move]) -> int:
    """Make the first replica of each moved partition its leader; return the number of elections that failed."""
    from mansio.client.types import TopicPartition

    wanted = {(move.topic, move.partition): move.after[0] for move in moves}
    leaders = {(one.topic, one.partition): one.leader for one in await cluster.partitions()}
    due = [TopicPartition(*key) for key, leader in wanted.items() if leaders.get(key, leader) != leader]
    results = await cluster.elect_leaders("preferred", due) if due else []
    return sum(result.outcome == "failed" for result in results)


class ProgressLines:
    """Prints how far the moves are to standard error: one line that changes on a terminal, else a line now and then."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._is_terminal = sys.stderr.isatty()
        self._last_s = float("-inf")
        self._is_open = False

    def end(self) -> None:
        """End the line, if the last one is not complete."""
        if self._is_open:
            self._is_open = False
            print(file=sys.stderr, flush=True)

    def show(self, progress: Progress) -> None:
        """Print the line, if it is time for it."""
        is_last = progress.moves_done == progress.moves
        now = self._clock()
        if not (self._is_terminal or is_last or now - self._last_s >= PROGRESS_LINE_S):
            return
        self._last_s = now
        self._is_open = self._is_terminal and not is_last
        text = (
            f"{progress.moves_done:,} of {progress.moves:,} moves, {bytes_text(progress.bytes_done)} of"
            f" {bytes_text(progress.bytes)}; {progress.running:,} running"
        )
        print(
            f"\r{text:<78}" if self._is_terminal else text,
            end="" if self._is_open else "\n",
            file=sys.stderr,
            flush=True,
        )


def bytes_text(size_bytes: float) -> str:
    """Return a size for people: `512 B`, `1.5 MB`, `20.0 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.1f} TB"


def duration_text(seconds: float) -> str:
    """Return a duration for people: `40 s`, `12 min`, `3 h 5 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
