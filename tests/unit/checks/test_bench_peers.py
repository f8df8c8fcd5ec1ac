"""The comparison with other queues states what was measured: arithmetic, counting of fsyncs, Mansio's own rows."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import os
import time
import zipfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
from bench.peers import clients, mansio_broker, releases, round_trips, syncs, table, workloads
from bench.peers.__main__ import PEERS, file_system_of
from bench.peers.peer import Candidate, PeerUnavailableError, ServerLocation
from bench.peers.round_trips import RoundTrips
from bench.peers.server import Server, free_port
from bench.peers.table import Entry
from bench.peers.workloads import WORKLOADS, Run
from rich.console import Console

import mansio
from support.machine import scaled
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.peers.workloads import Workload

BATCH100 = next(workload for workload in WORKLOADS if workload.name == "batch100")
CONSUME100 = next(workload for workload in WORKLOADS if workload.name == "consume100")
DELIVER1 = next(workload for workload in WORKLOADS if workload.name == "deliver1")
DELIVER1X4 = next(workload for workload in WORKLOADS if workload.name == "deliver1x4")
DELIVER100 = next(workload for workload in WORKLOADS if workload.name == "deliver100")
LATENCY = next(workload for workload in WORKLOADS if workload.name == "latency")
SIZE = 100
SYNCED = syncs.Syncs(seq=1.0, batch100=1.0, consume100=1.0)


def run_of(messages_per_s: float, *, p50_us: float | None = None, foreign_cores: float = 0.0) -> Run:
    return Run(1000, 1.0, messages_per_s, 0.1, 0.1, foreign_cores, p50_us, p50_us, began=100.0, ended=101.0)


def entry_of(
    name: str, *rates: float, server: str = "", counted: syncs.Syncs = SYNCED, raw: bool = False
) -> Entry:
    candidate = Candidate(name, name, "", True, server or name, Mock(), Mock(), "an answer", is_raw=raw)
    entry = Entry(candidate, syncs=counted)
    entry.runs[BATCH100.name, SIZE] = [run_of(rate) for rate in rates]
    return entry


def mansio_of(*rates: float, raw: bool = False) -> Entry:
    return entry_of("mansio-raw" if raw else "mansio", *rates, server="mansio", raw=raw)


# -- arithmetic --------


def test_a_lead_is_taken_between_runs_of_one_repetition() -> None:
    # The machine is three times slower in the last repetition; the lead is the same in all.
    lead = table.ahead(
        mansio_of(300, 330, 100), entry_of("p", 100, 110, 33.333), "batch100", SIZE, "messages_per_s"
    )
    assert lead is not None
    assert lead.ratios == pytest.approx((3, 3, 3), rel=0.01)


def test_a_shorter_latency_is_a_lead() -> None:
    ours, theirs = mansio_of(), entry_of("p")
    ours.runs["latency", SIZE] = [run_of(1000, p50_us=200)]
    theirs.runs["latency", SIZE] = [run_of(1000, p50_us=500)]
    (lead,) = table.leads([ours, theirs], LATENCY, SIZE, "p50_us")
    assert lead.median == pytest.approx(2.5)


def test_a_failed_run_costs_its_pair_only() -> None:
    ours, theirs = mansio_of(300, 300), entry_of("p", 100, 100)
    theirs.runs["batch100", SIZE][0] = None
    (lead,) = table.leads([ours, theirs], BATCH100, SIZE, "messages_per_s")
    assert lead.ratios == (3,)


def test_only_equals_are_compared_whatever_a_configuration_promises() -> None:
    weak = entry_of("weak", 900, counted=syncs.Syncs(seq=0.02, batch100=0.0))
    equal = entry_of("equal", 100)
    best = table.closest([mansio_of(300), weak, equal], BATCH100, SIZE, "messages_per_s")
    assert best is not None
    assert best.theirs is equal
    assert best.median == pytest.approx(3)


def test_delivery_is_compared_with_whose_acknowledgements_of_records_are_synced_and_who_is_asked_for() -> (
    None
):
    """What is published may be synced, and what is delivered not."""
    counted = {"redis": 1.0, "nats": 0.0, "beanstalkd": 1.0}
    entries = [
        entry_of(name, server=name if name in counted else "mansio", counted=replace(SYNCED, deliver1=count))
        for name, count in {"mansio": 1.0, **counted}.items()
    ]
    for entry, rate in zip(entries, (300, 100, 200, 900), strict=True):
        entry.runs[DELIVER1.name, SIZE] = [run_of(rate)]
    best = table.closest(entries, DELIVER1, SIZE, "messages_per_s")
    assert best is not None
    assert best.theirs.candidate.name == "redis"


def test_the_raw_load_is_nobodys_yardstick() -> None:
    assert (
        table.yardstick(
            [mansio_of(900, raw=True), ours := mansio_of(300)], "batch100", SIZE, "messages_per_s"
        )
        is ours
    )


def test_a_lead_below_what_is_asked_is_missed() -> None:
    assert BATCH100.lead_min == 3
    assert table.missed([mansio_of(299), entry_of("p", 100)], [BATCH100], [SIZE])
    assert not table.missed([mansio_of(301), entry_of("p", 100)], [BATCH100], [SIZE])


@pytest.mark.parametrize(("part", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100)])
def test_percentiles(part: float, expected: int) -> None:
    assert workloads.percentile(list(range(1, 101)), part) == expected


def test_what_the_table_shows() -> None:
    ours, theirs = mansio_of(300, 330), entry_of("Peer", 100, 110)
    theirs.runs["batch100", SIZE][1] = replace(run_of(110), foreign_cores=0.9)
    weak = entry_of("Weak", 1000, counted=syncs.Syncs(seq=0.0, batch100=0.0))
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(table.size_table([ours, weak, theirs], [BATCH100], SIZE))
    shown = capture.get()
    assert "~105" in shown  # disturbed
    assert "3.00x" in shown
    assert shown.index("mansio") < shown.index("Peer") < shown.index("weaker") < shown.index("Weak")


def test_the_age_of_a_server_is_shown_with_its_version_and_what_confirms() -> None:
    entry = entry_of("Peer", 100)
    entry.version, entry.released = "1.2, client 3", date(2025, 11, 30)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table.servers_table([entry], date(2026, 11, 30)))
    shown = capture.get()
    assert "1.2, client 3" in shown
    assert "2025-11-30, 1.0 years old" in shown
    assert "an answer" in shown


# -- what cannot have been confirmed --------


PLAIN_US, SYNCED_US = 20.0, 100.0


def trips_of() -> RoundTrips:
    return RoundTrips([PLAIN_US / 1e6] * 100, [SYNCED_US / 1e6] * 100)


def test_a_row_better_than_a_round_trip_with_a_sync_is_an_error_and_not_shown() -> None:
    """50,000 round trips per second are possible, but not with as many syncs."""
    ours, theirs = mansio_of(), entry_of("p", counted=replace(SYNCED, deliver1=1.0))
    ours.runs[DELIVER1.name, SIZE] = [run_of(9_000), run_of(9_000)]
    theirs.runs[DELIVER1.name, SIZE] = [run_of(40_000), run_of(9_999)]
    (reason,) = round_trips.refuse([ours, theirs], [DELIVER1], trips_of())
    assert "40,000/s" in reason
    assert "no more than 10,000/s" in reason
    assert theirs.failures == [reason]
    assert theirs.figures(DELIVER1.name, SIZE, "messages_per_s") == [None, 9_999]
    assert not ours.failures
    (lead,) = table.leads([ours, theirs], DELIVER1, SIZE, "messages_per_s")
    assert lead.ratios == pytest.approx((0.9,), rel=0.01)


def test_without_a_sync_a_row_may_take_a_round_trip_each() -> None:
    weak = entry_of("p", counted=replace(SYNCED, deliver1=0.0))
    weak.runs[DELIVER1.name, SIZE] = [run_of(49_999), run_of(50_001)]
    assert len(round_trips.refuse([weak], [DELIVER1], trips_of())) == 1


@pytest.mark.parametrize(
    ("workload", "possible_per_s"),
    [(DELIVER1, 50_000), (DELIVER1X4, 200_000), (BATCH100, 5_000_000), (CONSUME100, 5_000_000)],
    ids=lambda one: getattr(one, "name", one),
)
def test_each_client_confirms_a_batch_in_each_round_trip(workload: Workload, possible_per_s: int) -> None:
    assert not round_trips.refusal(run_of(possible_per_s - 1), workload, PLAIN_US)
    assert round_trips.refusal(run_of(possible_per_s + 1), workload, PLAIN_US)


def test_batches_whose_acknowledgements_are_in_flight_have_no_bound() -> None:
    assert not round_trips.refusal(run_of(1e9), DELIVER100, PLAIN_US)


def test_a_message_needs_a_round_trip_from_its_producer_to_its_consumer() -> None:
    assert round_trips.refusal(run_of(1000, p50_us=19.0), LATENCY, PLAIN_US)
    assert not round_trips.refusal(run_of(1000, p50_us=21.0), LATENCY, PLAIN_US)


def test_round_trips_are_measured_and_those_with_a_sync_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync that takes a time shows in all of them, and in no other."""
    real, slow_s = os.fdatasync, 0.005

    def slow(descriptor: int) -> None:
        time.sleep(slow_s)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)  # the answering process is forked from this one
    trips = RoundTrips()
    trips.probe(tmp_path, 0.02)
    synced, plain = trips.fastest_us(synced=True), trips.fastest_us(synced=False)
    assert synced is not None
    assert plain is not None
    assert synced >= slow_s * 1e6 > plain > 0


def test_without_a_probe_nothing_is_refused() -> None:
    entry = entry_of("p", 1e9)
    assert not round_trips.refuse([entry], [BATCH100], RoundTrips())


def test_a_sync_is_claimed_where_it_was_counted() -> None:
    entry = entry_of("p", counted=syncs.Syncs(seq=1.0, batch100=1.0, consume100=0.2, deliver1=1.0))
    assert [entry.claims_sync(each) for each in (BATCH100, CONSUME100, DELIVER1)] == [True, False, True]


def test_more_records_at_a_time_than_a_workload_asks_for_are_an_error() -> None:
    class Whole:
        async def next(self) -> list[bytes]:
            return [b""] * 100

        async def acknowledge(self) -> None: ...
        async def close(self) -> None: ...

    with pytest.raises(RuntimeError, match="100 records were delivered at a time instead of 1"):
        asyncio.run(workloads.deliver_for(Whole(), 1, 60.0))


# -- release dates --------


CHANGELOG = """\
redis (5:7.0.15-1~deb12u2) bookworm-security; urgency=high

  * Correct something.

 -- A Person <person@example.org>  Thu, 28 Nov 2024 23:28:52 +0200

redis (5:7.0.15-1) unstable; urgency=medium

  * New upstream release.

 -- A Person <person@example.org>  Tue, 09 Jan 2024 13:42:30 +0000

redis (5:7.0.14-2) unstable; urgency=medium

  * Refresh patches.

 -- A Person <person@example.org>  Tue, 31 Oct 2023 16:34:25 +0100
"""


def test_a_debian_package_is_as_old_as_its_upstream_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "redis-server").mkdir()
    (tmp_path / "redis-server/changelog.Debian.gz").write_bytes(gzip.compress(CHANGELOG.encode()))
    monkeypatch.setattr(releases, "DOCUMENTATION", (tmp_path,))
    assert releases.of_debian("redis-server", "7.0.15") == date(2024, 1, 9)
    assert releases.of_debian("redis-[a-z]*", "7.0.15") == date(2024, 1, 9)
    assert releases.of_debian("redis-server", "7.0.1") is None
    assert releases.of_debian("beanstalkd", "7.0.15") is None


def test_the_dates_of_a_jar_and_of_a_go_module(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "some.jar", "w") as jar:
        jar.writestr(zipfile.ZipInfo(releases.MANIFEST, (2026, 10, 6, 17, 22, 2)), "")
    assert releases.of_jar(tmp_path / "some.jar") == date(2026, 10, 6)
    assert releases.of_go_module(tmp_path / "module.info") is None
    (tmp_path / "module.info").write_text('{"Version":"v2.15.3","Time":"2026-11-11T11:09:33Z"}')
    assert releases.of_go_module(tmp_path / "module.info") == date(2026, 11, 11)


# -- counting --------


TRACE = """\
41 100.100000 fdatasync(7)          = 0
42 100.200000 fsync(8 <unfinished ...>
41 100.250000 fdatasync(7 <unfinished ...>
42 100.300000 <... fsync resumed>)  = 0
41 100.310000 <... fdatasync resumed>) = 0
41 100.400000 msync(0x7f, 4096, MS_SYNC) = 0
41 100.500000 fsync(9)              = -1 EINVAL (Invalid argument)
41 102.000000 fdatasync(7)          = 0
42 102.100000 +++ exited with 0 +++
"""


def test_each_fsync_is_counted_once_and_only_during_the_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text(TRACE)
    times = syncs.sync_times(trace)
    assert times == [100.1, 100.2, 100.25, 100.4, 102.0]
    assert syncs.syncs_per_unit(times, replace(run_of(4), messages=4), 1) == 1.0
    assert syncs.syncs_per_unit(times, replace(run_of(4), messages=400), 100) == 1.0


# -- the machinery --------


def test_names_are_unique_and_every_peer_states_what_an_acknowledgement_means() -> None:
    candidates = [one for peer in PEERS for one in peer.candidates()]
    names = [one.name for one in candidates]
    assert len(set(names)) == len(names)
    assert all(one.durability for one in candidates)


def test_every_peer_that_delivers_one_at_a_time_states_what_confirms_an_acknowledgement() -> None:
    candidates = [one for peer in PEERS for one in peer.candidates()]
    assert all(one.confirmation for one in candidates if DELIVER1.name not in one.skips)


def test_a_failure_in_a_client_process_is_reported_and_ends_the_others() -> None:
    async def fails(_: object) -> None:
        raise ValueError("no such queue")

    async def waits(ready: clients.Ready) -> None:
        ready()

    for works in ([fails, waits], [waits, fails]):
        with pytest.raises(clients.ClientError, match="no such queue"):
            clients.together(works, 5)


def test_a_server_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    place = ServerLocation(tmp_path / "server", free_port())
    place.directory.mkdir()
    server = Server(place)
    server.start(["sh", "-c", "echo not as root; exit 1"])
    with pytest.raises(PeerUnavailableError, match="not as root"):
        server.wait_for_port()


def test_the_file_system_of_memory_is_known() -> None:
    assert file_system_of(Path("/proc/self")) == "proc"


@pytest.fixture(scope="module")
def mansio_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = ServerLocation(tmp_path_factory.mktemp("peers") / "mansio", free_port())
    place.directory.mkdir()
    server = mansio_broker.serve(place)
    yield server
    server.stop()
    assert not server.tree()


QUEUES = itertools.count()


def test_a_client_consumes_what_another_has_published(mansio_server: Server) -> None:
    driver, queue = mansio_broker.OwnDriver(mansio_server.place.port), "counted"
    clients.alone(lambda: driver.create(queue))
    workloads.fill(driver, queue, SIZE, scaled(60), messages_max=SIZE, batch=SIZE)
    published = SIZE + workloads.WARM_UP_PUBLISHES

    async def take() -> int:
        consumer = await driver.consumer(queue, confirmed=True)
        taken = 0
        while taken < published:
            taken += len(await consumer.take(SIZE))
        await consumer.close()
        return taken

    assert clients.alone(take, scaled(60)) == published


@pytest.mark.full
@pytest.mark.parametrize("candidate", mansio_broker.candidates(), ids=lambda one: one.name)
def test_mansios_rows_are_measured(
    candidate: Candidate, mansio_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "QUIET_WAIT_S", 0.0)
    workload = BATCH100 if candidate.is_raw else CONSUME100  # which publishes first
    queue = f"queue{next(QUEUES)}"
    # The raw load is a process of its own, whose first record may be slow.
    seconds = scaled(1.0 if candidate.is_raw else 0.3)
    run = workloads.measure(candidate, mansio_server, workload, queue=queue, size=SIZE, seconds=seconds)
    assert run.messages >= workload.batch
    assert run.messages_per_s == pytest.approx(run.messages / run.seconds, rel=0.02)


@pytest.mark.full
def test_latency_counts_from_the_time_a_message_was_due(mansio_server: Server) -> None:
    driver = mansio_broker.OwnDriver(mansio_server.place.port)
    clients.alone(lambda: driver.create("paced"))
    found = workloads.paced(driver, "paced", SIZE, 0.2)
    assert found["messages"] == 200
    assert 0 < found["p50_us"] <= found["p99_us"]


@pytest.mark.full
@pytest.mark.parametrize(
    "candidate", [one for one in mansio_broker.candidates() if not one.is_raw], ids=lambda one: one.name
)
def test_one_at_a_time_each_acknowledgement_is_confirmed_before_the_next_record(
    candidate: Candidate, mansio_server: Server
) -> None:
    """When a record is returned, only that one is leased, and all before it are acknowledged."""
    driver, queue = candidate.driver(mansio_server.place.port), f"queue{next(QUEUES)}"
    records = 5
    clients.alone(lambda: driver.create(queue))
    workloads.fill(driver, queue, SIZE, scaled(60), messages_max=records, batch=1)

    async def work() -> list[tuple[int, int, int]]:
        deliverer = await driver.deliverer(queue, 1)
        seen = []
        try:
            async with mansio_broker.OwnDriver(mansio_server.place.port).connected() as client:
                for _ in range(records):
                    taken = len(await deliverer.next())
                    place = mansio.TopicPartition(queue, 0)
                    leases = present((await client.admin.shares.leases(f"share-{queue}", [place]))[place])
                    seen.append((taken, leases.start_offset, leases.leased))
        finally:
            await deliverer.acknowledge()
            await deliverer.close()
        return seen

    assert clients.alone(work, scaled(60)) == [(1, number, 1) for number in range(records)]


@pytest.mark.full
def test_a_client_that_gets_whole_batches_has_no_row_for_one_at_a_time(mansio_server: Server) -> None:
    """confluent-kafka's share consumer returns all records of a stored batch, whatever maximum it was given."""
    driver, queue = mansio_broker.ConfluentDriver(mansio_server.place.port), f"queue{next(QUEUES)}"
    clients.alone(lambda: driver.create(queue))
    workloads.fill(driver, queue, SIZE, scaled(60), messages_max=10, batch=10)

    async def work() -> None:
        deliverer = await driver.deliverer(queue, 1)
        try:
            await workloads.deliver_for(deliverer, 1, scaled(60))
        finally:
            await deliverer.acknowledge()
            await deliverer.close()

    with pytest.raises(clients.ClientError, match="10 records were delivered at a time instead of 1"):
        clients.alone(work, scaled(60))
