"""How long the partitions of a group go without a delivery while its members join, leave and are killed.

Owns: a steady load, members in processes of their own that note every delivery, and what follows from the notes: which
partitions moved at a change and which did not, the longest gap of each, what was delivered twice or not at all, and a
picture of it.

A machine that is busy delays everybody, so a gap says nothing alone. A second group under the same load, whose members
do not change, is the control: what delays both is not the rebalance.

Always true: all times are of the machine's monotonic clock, taken by the member in the moment of the delivery; only
the first delivery of a record counts for gaps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from confluent_kafka import Producer

from support.gap_member import GIVEN, LOST, RECORD, TAKEN, UP
from support.machine import scaled
from support.present import present
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from confluent_kafka import KafkaError, Message

SETTLED_DEADLINE_S = 30.0
EXIT_DEADLINE_S = 30.0
UP_DEADLINE_S = 60.0
CALM_S = 0.7
"""So long after a change it is looked at what may follow from it."""
TESTS = Path(__file__).parents[1]
MARKS = " .:-=+*#%@"
"""For `picture`: longer and longer."""


class Delivery(NamedTuple):
    """A record reached the program that asked for it."""

    at: float
    partition: int
    offset: int
    member: str


class Gap(NamedTuple):
    """Nothing new of a partition from `begin` to `end`."""

    partition: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Change(NamedTuple):
    """A member came or went. At `settled` the group was in order again; what happened until `end` is looked at."""

    name: str
    begin: float
    settled: float
    end: float


class Load:
    """Publishes a record to each partition every `interval_s`, from a thread of its own, from `start` to `stop`."""

    def __init__(self, bootstrap_servers: str, topic: str, partitions: int, interval_s: float) -> None:
        self.topic = topic
        self.partitions = partitions
        self.interval_s = interval_s
        self.stored: Counter[int] = Counter()
        """Acknowledged records by partition; their offsets are 0, 1, 2, ..."""
        self.failures: list[KafkaError] = []
        self._producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 0, "acks": "all"})
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Publish no more; all that was published is acknowledged when this returns."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._producer.flush(scaled(30))
        assert not self.failures, self.failures

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping.is_set():
            for partition in range(self.partitions):
                self._producer.produce(
                    self.topic, b"x" * 100, partition=partition, on_delivery=self._on_delivered
                )
            self._producer.poll(0)
            due = max(due + self.interval_s, time.monotonic())
            self._stopping.wait(max(0.0, due - time.monotonic()))

    def _on_delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failures.append(error)
        else:
            self.stored[present(message.partition())] += 1


class MemberProcess:
    """A member that notes its deliveries. Its process is up, and joins on command."""

    def __init__(self, kind: str, bootstrap_servers: str, group: str, topic: str, name: str) -> None:
        self.name = name
        self.deliveries: list[Delivery] = []
        self.given: list[tuple[float, int]] = []
        self.taken: list[tuple[float, int]] = []
        self.was_put_out = False
        self._is_up = threading.Event()
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.gap_member", kind, bootstrap_servers, group, topic],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_up(self) -> None:
        """Until all it needs is loaded."""
        wait_until(self._is_up.is_set, UP_DEADLINE_S, f"member {self.name} is up")

    def join(self) -> None:
        """Let it join its group."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"join\n")
        self._process.stdin.flush()

    def leave(self) -> None:
        """Let it leave its group, and wait until it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._end()
        assert code == 0, f"member {self.name} ended with {code}"

    def kill(self) -> None:
        """SIGKILL; all it noted is here when this returns. Harmless when it is gone."""
        self._process.kill()
        self._end()

    def _end(self) -> int:
        code = self._process.wait(scaled(EXIT_DEADLINE_S))
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return code

    def _read(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        while data := os.read(self._process.stdout.fileno(), 1 << 16):
            rest += data
            whole = len(rest) - len(rest) % RECORD.size
            for at, partition, what in RECORD.iter_unpack(rest[:whole]):
                if what >= 0:
                    self.deliveries.append(Delivery(at, partition, what, self.name))
                elif what == GIVEN:
                    self.given.append((at, partition))
                elif what in (TAKEN, LOST):
                    self.taken.append((at, partition))
                    self.was_put_out |= what == LOST
                elif what == UP:
                    self._is_up.set()
            rest = rest[whole:]


class WatchedGroup:
    """A group of such members. For a `with` block, at whose end they are killed if they are still there."""

    def __init__(self, kind: str, bootstrap_servers: str, group: str, load: Load) -> None:
        self._kind = kind
        self._bootstrap = bootstrap_servers
        self._group = group
        self._load = load
        self.everybody: dict[str, MemberProcess] = {}
        self.present: dict[str, MemberProcess] = {}
        self.changes: list[Change] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.everybody.values():
            member.kill()

    # -- members --------

    def prepare(self, *names: str) -> None:
        """Start processes, which takes the machine some time."""
        for name in names:
            self.everybody[name] = MemberProcess(
                self._kind, self._bootstrap, self._group, self._load.topic, name
            )

    def wait_until_up(self) -> None:
        """Until all that were prepared are ready to join."""
        for member in self.everybody.values():
            member.wait_until_up()

    def begin(self, *names: str) -> None:
        """The first members join."""
        for name in names:
            self.everybody[name].join()
            self.present[name] = self.everybody[name]

    def join(self, name: str) -> None:
        """A member that was prepared joins, and gets its share."""
        with self._changing(f"{name} joins"):
            self.begin(name)

    def leave(self, name: str) -> None:
        """A member leaves, and the others take its share."""
        with self._changing(f"{name} leaves"):
            self.present.pop(name).leave()

    def kill(self, name: str) -> None:
        """A member dies without a word, and the others take its share when its session is over."""
        with self._changing(f"{name} is killed"):
            self.present.pop(name).kill()

    @contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.wait_until_settled()
        settled = time.monotonic()
        self.wait_until_delivered_past(settled + CALM_S)
        self.changes.append(Change(what, begin, settled, time.monotonic()))

    def wait_until_settled(self) -> None:
        """Until every partition is delivered to one of those who are there, and the shares are even."""
        wait_until(self._is_settled, SETTLED_DEADLINE_S, "the group is in order")

    def wait_until_delivered_past(self, moment: float) -> None:
        """Until each partition has a delivery later than that."""
        wait_until(
            lambda: set(self._holders(moment)) == set(range(self._load.partitions)),
            SETTLED_DEADLINE_S,
            "deliveries go on",
        )

    def wait_until_all_is_delivered(self) -> None:
        """Until everything that was stored was delivered to some member; the load has been stopped."""
        wait_until(lambda: not self.missing(), SETTLED_DEADLINE_S, "everything is delivered")

    def _is_settled(self) -> bool:
        holders = self._holders(0.0)
        shares = Counter(dict.fromkeys(self.present, 0))
        shares.update(holders.values())
        everything = len(holders) == self._load.partitions
        return (
            everything
            and shares.keys() == self.present.keys()
            and max(shares.values()) - min(shares.values()) <= 1
        )

    def _holders(self, since: float) -> dict[int, str]:
        """Who had the last delivery of each partition, of those since a moment."""
        last: dict[int, Delivery] = {}
        for member in list(self.everybody.values()):
            newest: dict[int, Delivery] = {}
            for delivery in reversed(member.deliveries[-100 * self._load.partitions :]):
                newest.setdefault(delivery.partition, delivery)
            for partition, delivery in newest.items():
                if delivery.at > since and (partition not in last or last[partition].at < delivery.at):
                    last[partition] = delivery
        return {partition: delivery.member for partition, delivery in last.items()}

    # -- what happened --------

    def deliveries(self) -> list[Delivery]:
        """All of them, in the order of their times."""
        return sorted(delivery for member in self.everybody.values() for delivery in member.deliveries)

    def missing(self) -> set[tuple[int, int]]:
        """(partition, offset) of what was stored and not delivered."""
        got = {(one.partition, one.offset) for member in self.everybody.values() for one in member.deliveries}
        stored = {
            (partition, offset) for partition, count in self._load.stored.items() for offset in range(count)
        }
        return stored - got

    def twice(self) -> dict[tuple[int, int], list[str]]:
        """What was delivered more than once, and the members, in order."""
        seen: dict[tuple[int, int], list[str]] = {}
        for delivery in self.deliveries():
            seen.setdefault((delivery.partition, delivery.offset), []).append(delivery.member)
        return {place: members for place, members in seen.items() if len(members) > 1}

    @property
    def was_anybody_put_out(self) -> bool:
        """A member whose session ended although it lives: its machine did not let it speak."""
        return any(member.was_put_out for member in self.everybody.values())

    def moved(self, change: Change) -> set[int]:
        """The partitions that went from one member to another at a change."""
        holders: dict[int, set[str]] = {}
        last: dict[int, str] = {}
        for delivery in self.deliveries():
            if delivery.at <= change.begin:
                last[delivery.partition] = delivery.member
            elif delivery.at <= change.end:
                holders.setdefault(delivery.partition, set()).add(delivery.member)
        return {partition for partition, members in holders.items() if members != {last.get(partition)}}

    def reported(self, partitions: Iterable[int], change: Change) -> set[int]:
        """Those of the partitions that any member was given or deprived of at a change."""
        wanted = set(partitions)
        notes = [note for member in self.everybody.values() for note in (*member.given, *member.taken)]
        return {index for at, index in notes if change.begin < at <= change.end and index in wanted}

    def gaps(self, begin: float, end: float, partitions: Iterable[int] | None = None) -> list[Gap]:
        """All gaps that ended within a span of time, of all partitions or of some."""
        return gaps_between(
            self.deliveries(), begin, end, range(self._load.partitions) if partitions is None else partitions
        )


def gaps_between(
    deliveries: Sequence[Delivery], begin: float, end: float, partitions: Iterable[int]
) -> list[Gap]:
    """The gaps between first deliveries of each partition's records that ended within a span of time."""
    last: dict[int, float] = {}
    newest: dict[int, int] = {}
    found = []
    wanted = set(partitions)
    for at, partition, offset, _ in deliveries:
        if partition not in wanted or offset <= newest.get(partition, -1):
            continue
        if partition in last and begin < at <= end:
            found.append(Gap(partition, last[partition], at))
        last[partition], newest[partition] = at, offset
    return found


def longest(gaps: Iterable[Gap]) -> float:
    """Seconds; 0 if there is none."""
    return max((gap.seconds for gap in gaps), default=0.0)


def percentile(gaps: Iterable[Gap], share: float) -> float:
    """Seconds that `share` of the gaps do not exceed; 0 if there is none."""
    lengths = sorted(gap.seconds for gap in gaps)
    return lengths[min(len(lengths) - 1, int(share * len(lengths)))] if lengths else 0.0


def picture(
    gaps: Sequence[Gap],
    begin: float,
    end: float,
    *,
    changes: Mapping[float, str] | None = None,
    columns: int = 72,
    longest_s: float = 1.0,
) -> str:
    """Time to the right, a line per partition: the longer nothing came, the darker (blank: as usual; `@`: `longest_s`
    and more). Above it, what changed when."""
    step = (end - begin) / columns

    def column(at: float) -> int:
        return min(columns - 1, max(0, int((at - begin) / step)))

    usual = percentile(gaps, 0.5)
    lines = [
        " " * (4 + column(at)) + f"v {at - begin:.1f} s: {name}"
        for at, name in sorted((changes or {}).items())
    ]
    for partition in sorted({gap.partition for gap in gaps}):
        marks = [0] * columns
        for gap in gaps:
            if gap.partition == partition and gap.end > begin and gap.begin < end:
                share = min(1.0, max(0.0, gap.seconds - 2 * usual) / longest_s)
                mark = round(share * (len(MARKS) - 1))
                for place in range(column(gap.begin), column(gap.end) + 1):
                    marks[place] = max(marks[place], mark)
        lines.append(f"{partition:3} " + "".join(MARKS[mark] for mark in marks))
    return "\n".join(lines)


@contextmanager
def watched(
    kind: str, bootstrap_servers: str, load: Load, members: Sequence[str], later: Sequence[str], *, group: str
) -> Iterator[tuple[WatchedGroup, WatchedGroup]]:
    """Two groups of the same members under one load, which begins with them: the one whose members are to change, and
    the control. `later`: who may join the first one."""
    with ExitStack() as stack:
        changing = stack.enter_context(WatchedGroup(kind, bootstrap_servers, group, load))
        control = stack.enter_context(WatchedGroup(kind, bootstrap_servers, f"{group}-control", load))
        changing.prepare(*members, *later)
        control.prepare(*members)
        for one in (changing, control):
            one.wait_until_up()
        load.start()
        for one in (changing, control):
            one.begin(*members)
        for one in (changing, control):
            one.wait_until_settled()
        for one in (changing, control):
            one.wait_until_delivered_past(time.monotonic() + CALM_S)
        yield changing, control
