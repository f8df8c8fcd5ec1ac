"""Clients that continue while brokers of a cluster die, hang and return, and the times in which each partition accepted
no writes.

The clients and the judge are those of the kill tests of one broker. Owns when each record was acknowledged. Always
true: a pause is measured between two acknowledgements of one partition, so it includes whatever the clients take to
notice and to find the next leader.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka.admin import AdminClient, NewTopic

from mansio import TopicPartition, blocking
from support.machine import scaled
from support.nightly_counts import leave
from support.waiting import wait_until
from system.crash.checker import Acknowledged, Verdict, check
from system.crash.kill_load import PARTITIONS, QUIET, Load, committed_offsets, read_log, senders
from system.crash.share_load import ShareLoad

if TYPE_CHECKING:
    from support.cluster import Cluster

RESUME_S_MAX = 10.0
NIGHTLY_PAUSE_S = 0.05
NIGHTLY_FAULTS = int(os.environ.get("MANSIO_NIGHTLY_FAULTS", "40"))
"""Of each long test that takes its faults by chance."""

PROGRESS_S_MAX = 40.0
BEFORE_S = 0.5
"""Acknowledgements that a dead broker gave may still be on their way to a client's list."""


class Timed(list[Acknowledged]):
    """What was acknowledged, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[int, list[float]] = defaultdict(list)

    def append(self, one: Acknowledged) -> None:
        super().append(one)
        self.times[one.partition].append(time.monotonic())


class Pause(NamedTuple):
    """The longest time without an acknowledgement of one partition. `begin` and `end` are monotonic seconds."""

    partition: int
    begin: float
    end: float

    @property
    def length_s(self) -> float:
        return self.end - self.begin


class Paced(threading.Event):
    """Set or not, as any other; who asks waits a moment first, and a producer asks before each few records."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self._pause_s = pause_s

    def is_set(self) -> bool:
        time.sleep(self._pause_s)
        return super().is_set()


class ClusterLoad(Load):
    """See the module. `commits`: also a group that commits offsets; `pause_s`: how long each producer rests between few
    records, so that three brokers and their clients fit on two processors, and a long test into memory."""

    def __init__(self, cluster: Cluster, topic: str, *, commits: bool = True, pause_s: float = 0.02) -> None:
        super().__init__(cluster.bootstrap_servers, topic)
        self._producing = Paced(pause_s)
        self.cluster = cluster
        self._commits = commits
        self.timed = self.history.acknowledged = Timed()

    def create_topic(self, **config: Any) -> None:
        create_topic(self.cluster, self.topic, PARTITIONS, **config)

    def _commit(self, name: str) -> None:
        if self._commits:
            super()._commit(name)

    def begin(self, *, idempotent: int = 1, plain: int = 1) -> None:
        """Start, and return when every partition takes writes."""
        self.start(idempotent=idempotent, plain=plain)
        self.wait_resumed(time.monotonic())

    def wait_resumed(self, moment: float, records: int = 20) -> None:
        """Return when every partition has had so many acknowledgements after `moment`."""

        def resumed() -> bool:
            return all(
                sum(time_s > moment for time_s in self.timed.times[partition][-records:]) == records
                for partition in range(PARTITIONS)
            )

        try:
            wait_until(lambda: self.failures or resumed(), PROGRESS_S_MAX, "every partition takes writes")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.cluster.tails()}") from None
        assert not self.failures, self.failures

    def pauses(self, begin: float, end: float) -> list[Pause]:
        """The longest pause of each partition that ended between the two moments."""
        return [self.pause(partition, begin, end) for partition in range(PARTITIONS)]

    def pause(self, partition: int, begin: float, end: float) -> Pause:
        times = [time_s for time_s in list(self.timed.times[partition]) if begin - BEFORE_S <= time_s <= end]
        assert len(times) > 1, f"partition {partition} acknowledged nothing"
        gaps = [Pause(partition, *both) for both in itertools.pairwise(times)]
        return max(gaps, key=lambda gap: gap.length_s)

    def judge(self) -> Verdict:
        """Stop, read everything and compare; print the verdict."""
        self.stop_producing(deadline_s=80.0)
        self.wait_for_readers()
        self.stop()
        assert not self.failures, self.failures
        final = read_log(self.bootstrap_servers, self.topic)
        committed = (
            committed_offsets(self.bootstrap_servers, self.topic, "committer") if self._commits else None
        )
        verdict = check(self.history, final, idempotent=self.idempotent, committed=committed)
        assert senders(final) == set(self.history.sent), "every producer got something through"
        read = {name: len(seen) for name, seen in self.history.reads.items()}
        print(f"read {read}; {verdict}")
        assert not verdict.violations, str(verdict)
        assert min(read.values()) > verdict.acknowledged / 2, "the readers took part"
        return verdict


def create_topic(
    cluster: Cluster, topic: str, partitions: int = 1, *, copies: int = 3, **config: str
) -> None:
    """Make it, and return when all its replicas are in sync and its leaders know that they lead. Before, they refuse
    what they are sent, and librdkafka may let a later batch overtake the one it has to send again."""
    settings = {name.replace("_", "."): value for name, value in config.items()}
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, **QUIET})
    new = NewTopic(topic, partitions, copies, config=settings)
    admin.create_topics([new], request_timeout=scaled(30))[topic].result(scaled(30))
    cluster.wait_in_sync(topic)
    with blocking.connect(cluster.bootstrap_servers) as client:
        client.admin.list_offsets([TopicPartition(topic, index) for index in range(partitions)], "latest")


def share_load(one: Cluster, topic: str, group: str, *, lock_ms: int, states: str) -> ShareLoad:
    """The load of a share group that reads a new topic of one partition, not yet started. `states`: the topic of its
    share state, shown if the load does not go on."""
    create_topic(one, topic)

    def port() -> int:
        leader = one.leader(topic)
        if leader not in one.running:
            raise ConnectionError("nobody leads")
        return one.brokers[leader].kafka_port

    def places() -> str:
        known = [place for name in (topic, states, f"dlq.{topic}") for place in one.places(name)]
        return "\n".join([*map(str, known), one.tails(60)])

    load = ShareLoad(
        one.bootstrap_servers,
        port,
        topic=topic,
        group=group,
        lock_ms=lock_ms,
        seed=random.randrange(1 << 32),
        partitions=1,
        everywhere=lambda: {f"broker {each}": one.brokers[each].kafka_port for each in one.running},
        places=places,
    )
    load.begin()
    return load


def say(what: str, **figures: Any) -> None:
    """One line of figures, for the reader of the output, and in the night for the table."""
    print(what, json.dumps({name: _rounded(value) for name, value in figures.items()}))
    counted = {name: [value] if isinstance(value, float) else value for name, value in figures.items()}
    leave(what, **{name: value for name, value in counted.items() if isinstance(value, int | list)})


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 2)
    return [_rounded(one) for one in value] if isinstance(value, list) else value
