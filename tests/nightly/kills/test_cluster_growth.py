"""A cluster of three brokers becomes one of four and of three again, twice, with 200 partitions of 10 MB: first
undisturbed, to measure what the moves cost producers, then while brokers are killed."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import pytest
from confluent_kafka import Producer

from mansio import blocking
from support.cluster import on_same_processors
from support.machine import scaled
from system.cluster.load import create_topic, say
from system.cluster.test_cluster_growth import (
    JOINING,
    AllLoads,
    fill,
    join,
    joining_cluster,
    leave_cluster,
    move,
)
from system.crash.kill_load import QUIET

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from support.cluster import Cluster

FILLED: Final = 200
FILLED_BYTES: Final = 10_000_000
THROTTLE: Final = 20_000_000
PROBED: Final = 40
PROBE_PAUSE_S: Final = 0.1
BEFORE_S: Final = 30.0
WINDOW_S: Final = 30.0


@pytest.mark.timeout(3600)
def test_two_hundred_partitions_move_to_a_new_broker_and_back(tmp_path: Path) -> None:
    with joining_cluster(tmp_path) as one:
        fill(one, FILLED, FILLED_BYTES)
        create_topic(one, "probed", PROBED)
        with AllLoads(one) as loads:
            with Probes(one) as before:
                threading.Event().wait(BEFORE_S)
            join(one)
            with Probes(one) as during, CopiedBytes(one) as copied:
                move(one, "rebalance", throttle=str(THROTTLE))
            say(
                "two hundred partitions move",
                latency_ms_p99=[before.latency_ms_p99(), during.latency_ms_p99()],
                pause_ms_p99=[before.pause_ms_p99(), during.pause_ms_p99()],
                throttle_share=copied.rate() / THROTTLE,
                processors=on_same_processors(),
            )
            move(one, "drain", str(JOINING), throttle=str(THROTTLE))
            loads.wait_progress()
            move(one, "rebalance", throttle=str(THROTTLE), kills=("source", "target"))
            loads.wait_progress()
            move(one, "drain", str(JOINING), throttle=str(THROTTLE), kills=("controller", "target", "source"))
            loads.wait_progress()
            leave_cluster(one)
            loads.judge()
        one.check_logs()


class Probes:
    """One record for each partition of `probed` every `PROBE_PAUSE_S`, with acks=all: how long each took, and the
    longest pause of each partition."""

    def __init__(self, one: Cluster) -> None:
        self._producer = Producer(
            {"bootstrap.servers": one.bootstrap_servers, "enable.idempotence": True, "linger.ms": 0, **QUIET}
        )
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._latencies_s: list[float] = []
        self._times_s: dict[int, list[float]] = defaultdict(list)
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._is_over.wait(PROBE_PAUSE_S):
            for partition in range(PROBED):
                self._producer.produce("probed", b"probe", partition=partition, on_delivery=self._delivered)
            self._producer.poll(0)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.failures.append(str(error))
            return
        self._latencies_s.append(message.latency())
        self._times_s[message.partition()].append(time.monotonic())

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        assert self._producer.flush(scaled(30)) == 0
        assert not self.failures, self.failures

    def latency_ms_p99(self) -> float:
        return percentile_99([each * 1000 for each in self._latencies_s])

    def pause_ms_p99(self) -> float:
        """The 99th percentile of the longest pauses of all partitions, which include `PROBE_PAUSE_S`."""
        longest = [
            max(after - before for before, after in itertools.pairwise(times))
            for times in self._times_s.values()
        ]
        return percentile_99([each * 1000 for each in longest])


class CopiedBytes:
    """Bytes of `filled` on the new broker, each second."""

    def __init__(self, one: Cluster) -> None:
        self._one = one
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._samples: list[tuple[float, int]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def _run(self) -> None:
        with blocking.connect(self._one.bootstrap_servers) as client:
            while not self._is_over.wait(1.0):
                (row,) = (each for each in client.admin.cluster.log_dirs() if each.node_id == JOINING)
                size = sum(n for place, n in row.replica_bytes.items() if place.topic == "filled")
                self._samples.append((time.monotonic(), size))

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def rate(self) -> float:
        """Bytes per second over `WINDOW_S` in the middle of the copy, or over all of it if it took less."""
        end_bytes = self._samples[-1][1]
        moving = [(at, size) for at, size in self._samples if 0.05 * end_bytes < size < 0.95 * end_bytes]
        first = moving[0]
        last = max((each for each in moving if each[0] <= first[0] + WINDOW_S), key=lambda each: each[0])
        return (last[1] - first[1]) / (last[0] - first[0])


def percentile_99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]
