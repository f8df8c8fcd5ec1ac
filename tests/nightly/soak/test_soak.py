"""A broker under clients that come and go, for half an hour: memory, descriptors and latency do not drift.

`MANSIO_NIGHTLY_SOAK_MINUTES` sets another length; below ten minutes the trends are mostly noise, and the bounds allow
for it. Together with its clients it takes about one core: run nothing beside it whose own timing matters.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest

from mansio.wire.apis import fetch
from mansio.wire.batch.record_batch import iterate_batches
from mansio.wire.batch.record_reader import read_records
from nightly.soak.load import MIB, Churn, Clumsy, Steady, Worker
from nightly.soak.trend import after_warm_up, slope
from support.nightly_counts import leave
from support.process import ServedBroker, served
from support.raw_peer import RawPeer, batch_of, fetch_frame

if TYPE_CHECKING:
    from pathlib import Path

MINUTES = float(os.environ.get("MANSIO_NIGHTLY_SOAK_MINUTES", "30"))
SAMPLE_INTERVAL_S = 5.0 if MINUTES >= 10 else 1.0


MEMORY_MIB_MAX = 3.0
MEMORY_MIB_PER_HOUR_MAX = 8.0
"""What the trend may add up to: a few MiB, as an allocator takes for other sizes of things, and 8 MiB an hour, which is
less than the samples of an hour differ among each other. A leak of 1 KiB per life would be 25 MiB an hour."""

SHORT_S = 600
"""Before that, segments still fill up to what retention keeps, and every client counts."""

DESCRIPTORS_MAX = 6 if MINUTES * 60 >= SHORT_S else 60
THREADS_MAX = 1
LATENCY_RATIO_MAX = 0.5 if MINUTES * 60 >= SHORT_S else 5.0
"""The trend of the median latency over the whole time, as a part of that median."""

SETTINGS = {
    "log_retention_check_interval_ms": 1000,
    "producer_id_expiration_ms": 60_000,
    "group_min_session_timeout_ms": 100,
    "fetch_wait_ms_max": 5000,
}


class Sample(NamedTuple):
    """One look at the broker."""

    time_s: float
    memory_mib: float
    descriptors: int
    threads: int
    cpu_s: float
    p50_ms: float
    p99_ms: float


@pytest.mark.timeout(MINUTES * 60 + 300)
def test_half_an_hour_of_clients_that_come_and_go_leaves_no_trace(tmp_path: Path) -> None:
    arguments = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    with served(tmp_path / "data", arguments=arguments) as broker:
        prepare(broker)
        steady = Steady(broker.kafka_port)
        churn, clumsy = Churn(broker.bootstrap_servers, 1), Clumsy(broker.kafka_port, 2)
        workers = (steady, churn, clumsy)
        for worker in workers:
            worker.start()
        try:
            samples = watch(broker, steady, workers)
        finally:
            for worker in workers:
                worker.stop()
        failures = [failure for worker in workers for failure in worker.failures]
        assert not failures, failures
        found = stored(broker.kafka_port)
        assert found == [b"record %d" % number for number in range(steady.acknowledged)], (
            "acknowledged and lost"
        )
        print(f"{steady.acknowledged} acknowledged, 0 lost; {churn.lives} lives, {clumsy.lives} rude ones")
        leave("soak", acknowledged=steady.acknowledged, lives=churn.lives, rude_lives=clumsy.lives)
        assert "Traceback" not in broker.text()
    judge(samples)


def prepare(broker: ServedBroker) -> None:
    with RawPeer(broker.kafka_port) as peer:
        passing: dict[str, Any] = {
            "segment_bytes": str(MIB),
            "retention_bytes": str(2 * MIB),
            "retention_ms": "60000",
        }
        peer.create_topic("steady", segment_bytes=str(MIB))
        peer.create_topic("churn", 4, **passing)
        for topic in ("target", "silent"):
            peer.create_topic(topic, **passing)
        peer.create_topic("stored")
        for _ in range(4):
            peer.produce("stored", batch_of(b"s" * 900_000))


def watch(broker: ServedBroker, steady: Steady, workers: tuple[Worker, ...]) -> list[Sample]:
    process = psutil.Process(broker.pid)
    begin = time.monotonic()
    samples: list[Sample] = []
    while (now := time.monotonic() - begin) < MINUTES * 60:
        time.sleep(max((len(samples) + 1) * SAMPLE_INTERVAL_S - now, 0))
        if any(worker.failures for worker in workers):
            break
        latencies = sorted(steady.taken()) or [0.0]
        samples.append(
            Sample(
                time.monotonic() - begin,
                process.memory_info().rss / MIB,
                process.num_fds(),
                process.num_threads(),
                sum(process.cpu_times()[:2]),
                latencies[len(latencies) // 2] * 1000,
                latencies[len(latencies) * 99 // 100] * 1000,
            )
        )
    return samples


def stored(port: int) -> list[bytes | None]:
    """The values of all records of the steady client."""
    values: list[bytes | None] = []
    with RawPeer(port) as peer:
        while True:
            peer.send(fetch_frame("steady", offset=len(values), max_bytes=4 * MIB))
            answer = peer.frame()
            assert answer is not None
            batches = bytes(fetch.decode_response(12, answer).topics[0][2][0].records or b"")
            if not batches:
                return values
            for position, header in iterate_batches(batches):
                batch = batches[position : position + header.size]
                values += [record.value for record in read_records(batch, output_bytes_max=MIB)]


def judge(samples: list[Sample]) -> None:
    """Print the trends, and hold them against their bounds."""
    kept = after_warm_up(samples)
    times = [sample.time_s for sample in kept]
    hours = (times[-1] - times[0]) / 3600
    trends: dict[str, Any] = {}
    for name in ("memory_mib", "descriptors", "threads", "p50_ms", "p99_ms"):
        values = [getattr(sample, name) for sample in kept]
        trends[name] = slope(times, values) * 3600
        print(
            f"{name}: median {statistics.median(values):.2f}, from {min(values):.2f} to {max(values):.2f}, "
            f"trend {trends[name]:+.2f} an hour"
        )
    cpu = (kept[-1].cpu_s - kept[0].cpu_s) / (times[-1] - times[0])
    print(
        f"{len(kept)} samples over {hours * 60:.1f} minutes after warm-up; the broker took {cpu:.2f} of a core"
    )
    leave("soak, trend an hour", **trends)
    assert trends["memory_mib"] * hours <= MEMORY_MIB_MAX + MEMORY_MIB_PER_HOUR_MAX * hours
    assert trends["descriptors"] * hours <= DESCRIPTORS_MAX
    assert trends["threads"] * hours <= THREADS_MAX
    p50_ms = statistics.median(sample.p50_ms for sample in kept)
    assert trends["p50_ms"] * hours <= LATENCY_RATIO_MAX * p50_ms
