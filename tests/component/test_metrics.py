"""`/metrics`: names, units, types and help follow the conventions, and no client can create labels without limit."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import mansio
from mansio import errors
from mansio.api.asgi.server import HttpServer
from mansio.api.http import metrics_cluster
from mansio.api.http.app import assemble
from mansio.api.http.broker_stats import (
    Bounds,
    Distribution,
    FollowerSample,
    GroupLag,
    LeaderSample,
    Measurement,
    PartitionSample,
    Phase,
    RunningBroker,
)
from mansio.api.http.metrics import render, take_snapshot
from mansio.api.http.monitors import DiskMonitor, DiskSpace, EventLoopMonitor
from mansio.api.http.service_stats import ServiceStats
from mansio.broker.replication.log_repairer import RepairCounts
from mansio.broker.services.statistics import PROTOCOLS, SAMPLE_EVERY
from mansio.config.settings import Settings
from mansio.host.clock import HostClock
from mansio.host.disk import HostFile
from mansio.host.item_turns import Work
from mansio.metadata.controller.controller import ELECTION_CAUSES
from mansio.metadata.etcd.call_outcome import CallOutcome
from mansio.metadata.image import MetadataImage
from mansio.metadata.metadata_store import Keys, StoreCounts
from mansio.metadata.model import (
    BROKER_ACTIVE,
    BROKER_FENCED,
    TOPIC_LIVE,
    BrokerState,
    PartitionState,
    Registration,
    Topic,
)
from mansio.metadata.session import Session
from mansio.state.fetch_session import FetchSessions
from mansio.state.replica import ReplicationProgress
from mansio.wire.api_versions import ApiKey
from support.machine import scaled
from support.paths import ROOT
from support.present import present
from support.raw_peer import RawPeer, batch_of
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from prometheus_client import Metric

    from mansio.broker.services.health import Problem

UNITS = ("_seconds", "_bytes")
NOT_BASE_UNITS = re.compile(r"_(ms|milliseconds|us|kb|kib|mb|mib|minutes|hours|percent)(_|$)")
WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
ERROR_NAMES = {name for name in vars(errors) if name[0].isupper()} | {"Other"}

LABEL_RULES: dict[str, Any] = {
    "api": lambda value: value == "controller_mutation" or value.upper() in ApiKey.__members__,
    "error": lambda value: value in ERROR_NAMES,
    "code": lambda value: re.fullmatch(r"-?\d+", value),
    "reason": WORD.fullmatch,
    "state": WORD.fullmatch,
    "limit": ("leases", "rate").__contains__,
    "level": WORD.fullmatch,
    "kind": WORD.fullmatch,
    "cause": WORD.fullmatch,
    "outcome": WORD.fullmatch,
    "follower": str.isdigit,  # a broker's number
    "work": lambda value: value in [*Work, *PROTOCOLS],
    "waited": lambda value: value in ("true", "false"),
    "le": lambda value: float(value) > 0,
    "version": lambda value: value == mansio.__version__,
    "topic": lambda _: True,  # these are bounded in number: see the tests below
    "partition": str.isdigit,
    "group": lambda _: True,
}


class Timers:
    def call_later(self, delay_ms: float, callback: Any) -> Any:
        return self

    def cancel(self) -> None: ...


class StoppedClock(HostClock):
    def monotonic(self) -> float:
        return 0.0


class View:
    """A broker with as many partitions and groups as a test likes."""

    def __init__(self, partitions: int = 0, groups: int = 0, bounds: Bounds = Bounds()) -> None:  # noqa: B008
        self.bounds = bounds
        self.is_in_cluster = False
        self.partitions = partitions
        self.groups = groups
        self.pause_s = 0.0
        self.phase: Phase = "running"

    def may_describe(self, caller: Any) -> bool:
        del caller
        return True

    def problems(self) -> list[Any]:
        return []

    def warnings(self) -> list[Any]:
        return []

    def on_disk_full_change(self, listener: Any) -> None: ...

    def partition_samples(self) -> Iterator[PartitionSample]:
        for number in range(self.partitions):
            if self.pause_s:
                time.sleep(self.pause_s)
            yield PartitionSample(f"topic-{number // 10}", number % 10, 0, 5, 25, 25, 1000, False)

    def group_lags(self) -> Iterator[GroupLag]:
        return (GroupLag(f"group-{number}", "t", 1, 1) for number in range(self.groups))

    def measurements(self) -> list[Measurement]:
        return []

    def distributions(self) -> list[Distribution]:
        return []


class ClusterView(View):
    """A broker of a cluster: what it leads, and the numbers of its shipped parts over a state of the test's."""

    def __init__(self, led: Sequence[LeaderSample] = (), **known: Any) -> None:
        super().__init__(bounds=known.pop("bounds", Bounds()))
        self.is_in_cluster = True
        self.led = led
        self.service = clustered_service(**known)

    def partition_samples(self) -> Iterator[PartitionSample]:
        for number, led in enumerate(self.led):
            yield PartitionSample("t", number, 0, 0, 9, 9, 1, False, led)

    def measurements(self) -> list[Measurement]:
        return list(metrics_cluster.measurements(self.service))

    def problems(self) -> list[Problem]:
        return list(metrics_cluster.problems(self.service))

    def warnings(self) -> list[Problem]:
        return list(metrics_cluster.warnings(self.service))


def clustered_service(
    *, renewed_ago_s: float = 0.5, ttl_s: float = 6.0, isr: tuple[int, ...] = (1, 2, 3), leader: int = 1
) -> Any:
    """Broker 1 of three; one partition of three replicas. `renewed_ago_s`: its session was renewed then."""
    state = MetadataImage("c" * 22, Keys("c" * 22))
    for node_id in (1, 2):
        state.brokers[node_id] = BrokerState(node_id, "h", 9, None, node_id)
    state.registrations.update({1: Registration(BROKER_ACTIVE, 1), 3: Registration(BROKER_FENCED, 1)})
    partitions = (PartitionState((1, 2, 3), leader, 7, isr),)
    state.topics["t"] = Topic("t", UUID(int=5), partitions, 3, {}, False, TOPIC_LIVE, 1)
    session = Session(1, ttl_s, 1000 - renewed_ago_s)
    session.epoch = 1
    cluster = SimpleNamespace(
        controller=SimpleNamespace(is_active=True, elections=dict.fromkeys(ELECTION_CAUSES.values(), 2)),
        isr_manager=SimpleNamespace(shrink_count=3, expansion_count=4),
        fetcher_manager=SimpleNamespace(failed_replicas=lambda: iter(())),
        session=lambda: session,
        is_session_valid=lambda: session.is_valid(1000),
        sessions_lost=lambda: 1,
        hand_over=SimpleNamespace(counts={"handed_over": 1}),
        repair_counts=lambda: RepairCounts(2, 3000, 1),
        store_counts=lambda: StoreCounts(10, 1, {outcome.name.lower(): 1 for outcome in CallOutcome}),
    )
    services = SimpleNamespace(
        cluster=cluster,
        fetch=SimpleNamespace(sessions=FetchSessions(1)),
        topics=SimpleNamespace(state=state, settings_of=lambda _: SimpleNamespace(min_insync_replicas=2)),
        clock=SimpleNamespace(monotonic=lambda: 1000.0),
        settings=Settings(node_id=1),
    )
    return SimpleNamespace(
        services=services,
        is_ready=lambda: True,
        etcd_member=SimpleNamespace(is_running=True, restarts=0),
    )


def scrape(view: Any, disk: DiskMonitor | None = None) -> dict[str, Metric]:
    watch = EventLoopMonitor(Timers(), HostClock())
    body, _ = render(asyncio.run(take_snapshot(view, watch, disk)), "")
    return {family.name: family for family in text_string_to_metric_families(body.decode())}


def view_of(broker: mansio.Broker) -> ServiceStats:
    view = ServiceStats(present(broker._broker).settings)
    view.attach(
        RunningBroker(
            present(broker._broker).service,
            present(broker._broker).server,
            present(broker._broker).clients,
            present(broker._broker).listener_address,
            lambda: present(broker._broker).is_ready,
        )
    )
    return view


def value(families: dict[str, Metric], family: str, **labels: str) -> float:
    (found,) = [
        sample.value
        for sample in families[family].samples
        if sample.labels == labels and not sample.name.endswith("_created")
    ]
    return found


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Metric]:
    """Everything a broker exports after some of everything happened to it."""
    with mansio.Broker(tmp_path_factory.mktemp("metrics") / "data", offsets_topic_num_partitions=1) as broker:
        with mansio.blocking.connect(broker.address) as client:
            client.admin.create_topic("t", partitions=2)
            for number in range(3 * SAMPLE_EVERY):
                client.publish("t", b"value", partition=number % 2)
            client.admin.reset_offsets("g", ["t"], to="latest")
            client.publish("t", b"one more", partition=0)
            with pytest.raises(mansio.MansioError):
                client.publish("t", b"x" * 5_000_000)
            with pytest.raises(mansio.MansioError):
                client.admin.delete_topic("nothing")
        wait_until(lambda: present(broker._broker).server.connection_count == 0)
        disk = DiskMonitor("/", 1)
        disk.query()
        alone = scrape(view_of(broker), disk)
        assert not {"mansio_leader_partitions", "mansio_session_held"} & alone.keys(), (
            "one broker has no replicas"
        )
        copies = [FollowerSample(2, 5, 1.5), FollowerSample(3, 0, 0.0)]
        return scrape(ClusterView([LeaderSample(True, False, copies)], leader=-1), disk) | alone


def ours(families: dict[str, Metric]) -> list[Metric]:
    return [family for name, family in families.items() if name.startswith("mansio_")]


def test_every_metric_has_help_a_type_and_a_name_by_the_conventions(families: dict[str, Metric]) -> None:
    assert len(ours(families)) > 40
    for family in ours(families):
        assert len(family.documentation) > 10, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert re.fullmatch(r"mansio(_[a-z0-9]+)+", family.name), family.name
        assert not NOT_BASE_UNITS.search(family.name), f"{family.name}: seconds and bytes, please"
        names = {sample.name for sample in family.samples}
        if family.type == "counter":
            assert names <= {f"{family.name}_total"}, names
        else:
            assert not family.name.endswith("_total")
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        for unit in UNITS:
            assert unit.strip("_") not in family.name.split("_")[:-1], f"{family.name}: the unit is last"


def test_no_label_has_values_without_bound(families: dict[str, Metric]) -> None:
    for family in ours(families):
        shapes = set()
        for sample in family.samples:
            shapes.add(frozenset(sample.labels) - {"le"})
            for label, text in sample.labels.items():
                assert label in LABEL_RULES, f"{family.name}: nobody has said what bounds the label {label}"
                assert LABEL_RULES[label](text), f"{family.name}: {label}={text}"
        assert len(shapes) <= 1, f"{family.name}: {shapes}"


def test_what_happened_is_counted(families: dict[str, Metric]) -> None:
    assert value(families, "mansio_group_lag_records", group="g", topic="t") == 1
    assert value(families, "mansio_topic_records", topic="t") == 3 * SAMPLE_EVERY + 1
    assert (
        value(
            families, "mansio_request_errors", api="delete_topics", error="UnknownTopicOrPartition", code="3"
        )
        == 1
    )
    assert value(families, "mansio_failed_partitions") == 0
    assert value(families, "mansio_connections") == 0
    assert value(families, "mansio_connections_accepted") >= 1
    assert value(families, "mansio_groups", state="Empty") == 1
    assert value(families, "mansio_disk_low") == 0


def test_histograms_are_cumulative_and_hold_what_was_sampled(families: dict[str, Metric]) -> None:
    for name in ("mansio_produce_acknowledge_seconds", "mansio_fsync_duration_seconds"):
        samples = families[name].samples
        buckets = [sample.value for sample in samples if sample.name.endswith("_bucket")]
        assert buckets == sorted(buckets)
        (count,) = [sample.value for sample in samples if sample.name.endswith("_count")]
        (total,) = [sample.value for sample in samples if sample.name.endswith("_sum")]
        assert buckets[-1] == count
        assert 0 < total < 60
        assert count >= 3, "one batch in 16 of 48, and a sync for each"


def test_requests_are_timed_one_in_sixteen_and_no_more(families: dict[str, Metric]) -> None:
    (count,) = [
        sample.value
        for sample in families["mansio_produce_acknowledge_seconds"].samples
        if sample.name.endswith("_count")
    ]
    assert count <= (3 * SAMPLE_EVERY + 10) / SAMPLE_EVERY + 1


# Bounds


def test_up_to_the_bound_each_partition_is_shown_and_beyond_it_none_but_the_sums() -> None:
    within = scrape(View(100, bounds=Bounds(partitions_max=100)))
    assert len(within["mansio_partition_high_watermark"].samples) == 100
    beyond = scrape(View(101, bounds=Bounds(partitions_max=100)))
    assert not beyond["mansio_partition_high_watermark"].samples
    assert value(beyond, "mansio_metrics_omitted", kind="partition") == 101
    assert value(beyond, "mansio_partitions") == 101
    assert value(beyond, "mansio_topic_records", topic="topic-3") == 250
    assert value(beyond, "mansio_log_size_bytes") == 101_000


def test_topics_and_groups_beyond_the_bound_are_counted_and_not_shown() -> None:
    found = scrape(View(200, 50, Bounds(partitions_max=0, series_max=7)))
    assert len(found["mansio_topic_records"].samples) == 7
    assert len(found["mansio_group_lag_records"].samples) == 7
    assert value(found, "mansio_metrics_omitted", kind="topic") == 13
    assert value(found, "mansio_metrics_omitted", kind="group") == 43
    assert value(found, "mansio_topics") == 20


def test_scrape_of_2000_partitions_is_bounded_in_work_and_in_size() -> None:
    began = time.process_time()
    found = scrape(View(2_000, 2_000))
    assert time.process_time() - began < scaled(1.0)
    assert sum(len(family.samples) for family in found.values()) < 3_000


def test_loop_is_shared_while_numbers_are_read() -> None:
    view = View(400)
    view.pause_s = 0.0002

    async def story() -> int:
        turns = 0
        done = asyncio.Event()

        async def others() -> None:
            nonlocal turns
            while not done.is_set():
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(others())
        await take_snapshot(view, EventLoopMonitor(Timers(), HostClock()))
        done.set()
        await beside
        return turns

    assert asyncio.run(story()) >= 20  # 80 ms of reading in slices of 2 ms


def test_too_many_scrapes_at_a_time_are_sent_away() -> None:
    view = View(50)
    view.pause_s = 0.002

    async def story() -> list[int]:
        server = HttpServer(assemble(view, EventLoopMonitor(Timers(), HostClock())), "127.0.0.1", 0)
        host, port = await server.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=scaled(30)) as client:
                answers = await asyncio.gather(*(client.get("/metrics") for _ in range(12)))
                return [answer.status_code for answer in answers]
        finally:
            await server.stop()

    codes = asyncio.run(story())
    assert set(codes) == {200, 503}


# A cluster


def test_what_a_leader_knows_of_its_followers_is_summed_and_the_worst_is_shown_by_broker() -> None:
    found = scrape(
        ClusterView(
            [
                LeaderSample(False, False, [FollowerSample(2, 5, 1.5), FollowerSample(3, 0, 0.0)]),
                LeaderSample(True, False, [FollowerSample(2, 2, 9.0), FollowerSample(3, -1, 60.0)]),
                LeaderSample(True, True, [FollowerSample(3, 7, 2.0)]),
            ],
            bounds=Bounds(partitions_max=0, series_max=0),
        )
    )
    assert value(found, "mansio_leader_partitions") == 3
    assert value(found, "mansio_under_replicated_partitions") == 2
    assert value(found, "mansio_under_min_isr_partitions") == 1
    assert value(found, "mansio_follower_lag_records", follower="2") == 5
    assert value(found, "mansio_follower_lag_seconds", follower="2") == 9
    assert value(found, "mansio_follower_lag_records", follower="3") == 7
    assert value(found, "mansio_follower_lag_seconds", follower="3") == 60
    silent = scrape(ClusterView([LeaderSample(True, False, [FollowerSample(3, -1, 60.0)])]))
    assert not silent["mansio_follower_lag_records"].samples, "not known is not nothing"


def test_a_leader_measures_how_far_its_followers_are_behind_by_what_they_have_on_disk() -> None:
    replica = ReplicationProgress(
        1, 7, frozenset({1, 2}), 50, replicas=(1, 2, 3), min_insync_replicas=3, now_ms=1000.0
    )
    replica.on_follower_fetch(2, 1, 60, 60, 4000.0)
    partition: Any = SimpleNamespace(leader_progress=replica, end_offset=75, now_ms=lambda: 9000.0)
    led = metrics_cluster.leader_sample(partition)
    assert led == LeaderSample(True, True, (FollowerSample(2, 15, 5.0), FollowerSample(3, -1, 8.0)))
    replica.on_follower_fetch(2, 1, 75, 75, 5000.0)
    assert present(metrics_cluster.leader_sample(partition)).followers[0] == FollowerSample(2, 0, 0.0), (
        "it has all there is"
    )
    partition.leader_progress = None
    assert metrics_cluster.leader_sample(partition) is None


def test_numbers_of_a_session_of_etcd_and_of_the_whole_cluster() -> None:
    found = scrape(ClusterView(leader=-1))
    assert value(found, "mansio_brokers") == 2
    assert value(found, "mansio_fenced_brokers") == 1
    assert value(found, "mansio_offline_partitions") == 1
    assert value(found, "mansio_session_held") == 1
    assert value(found, "mansio_session_renewal_age_seconds") == 0.5
    assert value(found, "mansio_etcd_errors", outcome="unknown") == 1
    assert value(found, "mansio_leader_elections", cause="leader_failed") == 2
    assert value(found, "mansio_leader_partitions") == 0


@pytest.mark.parametrize(
    ("renewed_ago_s", "reasons", "worries"),
    [
        (0.5, [], []),
        (3.5, [], ["etcd_unresponsive"]),
        (5.0, ["session_not_held"], []),
    ],
)
def test_session_that_is_not_renewed_is_a_warning_first_and_a_reason_when_it_may_be_over(
    renewed_ago_s: float, reasons: list[str], worries: list[str]
) -> None:
    view = ClusterView(renewed_ago_s=renewed_ago_s)
    assert [one.reason for one in view.problems()] == reasons
    assert [one.reason for one in view.warnings()] == worries
    view.service.is_ready = lambda: False
    assert view.problems() == [], "one that has not registered yet, or is stopping, says that"


def test_replicas_that_are_not_in_sync_here_or_too_few_elsewhere_are_warnings_with_their_names() -> None:
    def warned(**known: Any) -> list[tuple[str, bool]]:
        return [(one.reason, "t-0" in one.detail) for one in ClusterView(**known).warnings()]

    assert warned(isr=(1, 2)) == []
    assert warned(isr=(2, 3), leader=2) == [("replicas_not_in_sync", True)]
    assert warned(isr=(1,)) == [("under_min_isr", True)]
    assert warned(isr=(2,), leader=2) == [("replicas_not_in_sync", True)]
    view = ClusterView()
    view.service.etcd_member.is_running = False
    assert [one.reason for one in view.warnings()] == ["etcd_member_down"]


# Failures


def test_failed_sync_shows_in_health_and_metrics_with_its_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = HostFile.sync

    def sync(self: HostFile) -> None:
        if "/bad." in self.path:
            raise OSError(errno.EIO, "Input/output error", self.path)
        true(self)

    monkeypatch.setattr("mansio.host.disk.HostDisk.sync_all", lambda self, path: False)
    with mansio.Broker(tmp_path / "data") as broker:
        with RawPeer(int(broker.address.rpartition(":")[2])) as writer:
            for topic in ("bad", "good"):
                writer.create_topic(topic)
            monkeypatch.setattr(HostFile, "sync", sync)
            assert writer.produce("bad", batch_of(b"value")).error_code == errors.StorageError.kafka_code
            assert writer.produce("good", batch_of(b"value")).error_code == 0
        found = scrape(view_of(broker))
        assert value(found, "mansio_failed_partitions") == 1
        assert value(found, "mansio_partition_failed", topic="bad", partition="0", reason="log_failed") == 1
        (problem,) = view_of(broker).problems()
        assert (problem.reason, problem.topic, problem.partition) == ("log_failed", "bad", 0)
        assert "Input/output error" in problem.detail
        assert sum(
            sample.value
            for sample in found["mansio_request_errors"].samples
            if sample.labels["api"] == "produce" and sample.labels["error"] == "StorageError"
        )


def test_partition_that_is_damaged_at_start_shows_as_corrupt(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path / "data") as broker, mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("t")
        client.publish("t", b"value")
    (segment,) = tmp_path.glob("data/topics/t.*/0/*.log")
    segment.write_bytes(b"")
    with mansio.Broker(tmp_path / "data") as broker:
        (problem,) = view_of(broker).problems()
        assert (problem.reason, problem.topic, problem.partition) == ("log_corrupt", "t", 0)
        assert value(
            scrape(view_of(broker)), "mansio_partition_failed", topic="t", partition="0", reason="log_corrupt"
        )


def test_low_disk_warns_in_health_and_metrics_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    space = DiskSpace(50 << 20, 1 << 30)
    disk = DiskMonitor("/data", 100 << 20, query=lambda _: space)
    caplog.set_level("INFO")
    disk.query()
    disk.query()
    assert [reason for reason, _ in disk.warnings()] == ["disk_low"]
    assert value(scrape(View(), disk), "mansio_disk_low") == 1
    assert value(scrape(View(), disk), "mansio_disk_free_bytes") == 50 << 20
    space = DiskSpace(500 << 20, 1 << 30)
    disk.query()
    assert disk.warnings() == []
    assert [record.message for record in caplog.records] == ["disk_space_low", "disk_space_recovered"]


def test_disk_that_does_not_answer_is_reported_and_never_waited_for() -> None:
    def broken(path: str) -> DiskSpace:
        raise OSError(errno.EIO, "Input/output error")

    disk = DiskMonitor("/data", 100, query=broken)
    disk.query()
    assert [reason for reason, _ in disk.warnings()] == ["disk_unresponsive"]
    assert "mansio_disk_free_bytes" not in scrape(View(), disk)


def test_ready_shows_the_data_directory_and_its_space() -> None:
    async def story() -> dict[str, Any]:
        disk = DiskMonitor("/data", 100 << 20, query=lambda _: DiskSpace(50 << 20, 1 << 30))
        disk.query()
        server = HttpServer(
            assemble(View(), EventLoopMonitor(Timers(), StoppedClock()), disk), "127.0.0.1", 0
        )
        host, port = await server.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
                answer = await client.get("/health/ready")
                return {"status": answer.status_code, **answer.json()}
        finally:
            await server.stop()

    reported = asyncio.run(story())
    assert reported["status"] == 200, "a warning keeps no work away"
    assert [warning["reason"] for warning in reported["warnings"]] == ["disk_low"]
    assert reported["disk"] == {"data_dir": "/data", "free_bytes": 50 << 20, "size_bytes": 1 << 30}


# The dashboard


def test_dashboard_asks_only_for_what_is_exported(families: dict[str, Metric]) -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/mansio.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    exported = {sample.name for family in families.values() for sample in family.samples} | set(families)
    queryed = {name for query in queries for name in re.findall(r"\b((?:mansio|process)_[a-z0-9_]+)", query)}
    assert len(queries) > 30
    assert queryed - exported == set()


def test_dashboard_panels_have_titles_and_do_not_overlap() -> None:
    panels = json.loads((ROOT / "deploy/grafana/mansio.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_settings_bound_what_is_shown() -> None:
    view = ServiceStats(Settings(metrics_partitions_max=3, metrics_series_max=4))
    assert view.bounds == Bounds(3, 4)
