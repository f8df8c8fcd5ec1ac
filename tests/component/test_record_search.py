"""Search for records by key or id, over real sockets: what is found over each protocol, what a search reads, and what
happens to the process that searches."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest

import mansio
from mansio.broker.services import record_search
from mansio.broker.services.record_search import DELETED, RecordQuery
from mansio.errors import (
    InvalidRequest,
    NotLeaderOrFollower,
    RequestTimedOut,
    ThrottlingQuotaExceeded,
    TopicAuthorizationFailed,
    Unavailable,
    UnknownTopicOrPartition,
)
from mansio.ports import FileJob
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.testing import TestBroker
from mansio.wire.api_versions import ApiKey
from support.machine import scaled
from support.present import present
from support.process import served
from support.record_rights import RecordRights
from support.waiting import wait_until
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.broker.routing.caller import Caller
    from mansio.host.worker_process import WorkerProcess

TOPIC = "orders"
KEY = "ann"
FAR = 1 << 60


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        running.client().admin.create_topic(TOPIC, partitions=3)
        yield running


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[mansio.Broker]:
    """A broker on a disk, which searches in another process."""
    with mansio.Broker(tmp_path / "data") as running:
        yield running


def publish(client: mansio.blocking.Client) -> list[mansio.RecordMetadata]:
    """A record with the key in each of two partitions, between others; they have ids."""
    records = [
        mansio.OutgoingRecord(b"1", b"bob", partition=0),
        mansio.OutgoingRecord(b"2", KEY.encode(), partition=0),
        mansio.OutgoingRecord(b"\x06ann", None, partition=1),  # the bytes of the key, in a value
        mansio.OutgoingRecord(b"4", KEY.encode(), partition=2),
    ]
    with client.producer(mansio.ProducerOptions(record_ids=True)) as producer:
        return producer.publish_many(TOPIC, records)


def places(found: Any) -> list[tuple[int, int]]:
    return sorted((each.partition, each.offset) for each in found)


def worker_of(broker: mansio.Broker) -> WorkerProcess:
    return cast("WorkerProcess", present(broker._broker).service.record_search.worker)


@pytest.mark.row("T1")
def test_records_are_found_by_key_and_id_over_each_protocol(broker: TestBroker) -> None:
    pytest.importorskip("grpc")
    import grpc

    from mansio.api.grpc import mansio_pb2 as pb

    client = broker.client()
    stored = publish(client)
    traces = client.admin.traces
    assert places(traces.find(TOPIC, key=KEY)) == [(0, 1), (2, 0)]
    assert places(traces.find(TOPIC, key=KEY, partition=2)) == [(2, 0)]
    assert len(places(traces.find(TOPIC, key=KEY, limit=1))) == 1
    for each in stored:
        assert places(traces.find(TOPIC, record_id=each.record_id)) == [(each.partition, each.offset)]
    (message,) = client.consume(TOPIC, from_="earliest", max_records=1)
    assert message.record_id in {each.record_id for each in stored}

    shell = Shell(broker.bootstrap_servers)
    lines = shell.json_lines("trace", TOPIC, "--key", KEY)
    assert sorted((each["partition"], each["offset"]) for each in lines) == [(0, 1), (2, 0)]
    assert all(each["events"][0]["kind"] == "published" for each in lines)
    (own,) = shell.json_lines("produce", TOPIC, "--record-ids", stdin=b"plums")
    (line,) = shell.json_lines("trace", TOPIC, "--id", own["record_id"])
    assert (line["partition"], line["offset"]) == (own["partition"], own["offset"])
    assert "published" in shell("trace", TOPIC, "--id", present(stored[0].record_id), "--since", "-1h")
    with httpx.Client(base_url=f"{broker.http_url}/v1", timeout=scaled(20)) as http:
        answer = http.get(f"/topics/{TOPIC}/search", params={"key": KEY})
        assert answer.status_code == 200, answer.text
        outcomes = [json.loads(each) for each in answer.text.splitlines()]
        assert outcomes[-1] == {"end": True}
        found = [each["found"] for each in outcomes if "found" in each]
        assert sorted((each["partition"], each["offset"]) for each in found) == [(0, 1), (2, 0)]
        progress = [each["progress"] for each in outcomes if "progress" in each]
        assert progress[-1]["finished_partitions"] == 3
        assert http.get(f"/topics/{TOPIC}/search").status_code == 400
        assert http.get(f"/topics/{TOPIC}/search", params={"key_base64": "?"}).status_code == 400
        assert http.get("/topics/nothing/search", params={"key": KEY}).status_code == 404
    with grpc.insecure_channel(broker.grpc_address) as channel:
        call = channel.unary_stream(
            "/mansio.v1.Mansio/FindRecords",
            request_serializer=pb.FindRecordsRequest.SerializeToString,
            response_deserializer=pb.FindRecordsResponse.FromString,
        )
        answers = list(call(pb.FindRecordsRequest(topic=TOPIC, key=KEY.encode()), timeout=scaled(20)))
    assert sorted(
        (each.found.partition, each.found.offset) for each in answers if each.HasField("found")
    ) == [(0, 1), (2, 0)]
    assert answers[-1].progress.finished_partitions == 3


@pytest.mark.full
def test_a_search_without_a_match_or_with_wrong_arguments_is_refused(broker: TestBroker) -> None:
    publish(broker.client())
    shell = Shell(broker.bootstrap_servers)
    shell("trace", TOPIC, "--key", "nobody", code=1)
    for wrong in (
        ("trace", TOPIC, "--key", "a", "--id", "b"),
        ("trace", "--key", "a"),
        ("trace", f"{TOPIC}/0/0", "--key", "a"),
        ("trace", f"{TOPIC}/0/0", "--limit", "1"),
    ):
        shell(*wrong, code=2)
    traces = broker.client().admin.traces
    with pytest.raises(ValueError, match="either a key or"):
        list(traces.find(TOPIC))
    with pytest.raises(UnknownTopicOrPartition):
        list(traces.find(TOPIC, key=KEY, partition=3))
    with pytest.raises(UnknownTopicOrPartition):
        list(traces.find("nothing", key=KEY))


@pytest.mark.full
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_another_process_searches_the_files_of_a_broker(embedded: mansio.Broker, codec: Any) -> None:
    with mansio.blocking.connect(embedded.address, producer=mansio.ProducerOptions(codec=codec)) as client:
        client.admin.create_topic(TOPIC, partitions=1, config={"segment.bytes": "20000"})
        assert worker_of(embedded).pid is None, "nothing was searched yet"
        records = [mansio.OutgoingRecord(os.urandom(500), b"key-%d" % (number % 50)) for number in range(500)]
        for begin in range(0, 500, 10):
            client.publish_many(TOPIC, records[begin : begin + 10])
        seen: list[mansio.SearchProgress] = []
        found = list(client.admin.traces.find(TOPIC, key="key-7", limit=100, on_progress=seen.append))
        assert [each.offset for each in found] == list(range(7, 500, 50))
        assert seen[-1].searched_bytes > 200_000
        assert seen[-1].left_bytes == 0
        assert [each.left_bytes for each in seen] == sorted((each.left_bytes for each in seen), reverse=True)
        pid = present(worker_of(embedded).pid)
        if hasattr(os, "SCHED_IDLE"):
            assert os.sched_getscheduler(pid) == os.SCHED_IDLE
        autogroup = Path(f"/proc/{pid}/autogroup")
        if autogroup.exists():  # otherwise its session would share the processor with that of the broker
            assert autogroup.read_text().endswith("nice 19\n")


async def step(
    client: mansio.Client, offset: int, end_offset: int = -1, matches: int = 1, key: str = KEY
) -> Any:
    """One request to the leader."""
    fields = {
        "topic": TOPIC,
        "partition_index": 0,
        "offset": offset,
        "end_offset": end_offset,
        "since_ms": -1,
        "until_ms": FAR,
        "key": key.encode(),
        "record_id": None,
        "max_wait_ms": 1_000,
        "max_matches": matches,
    }
    return await client._cluster.request(ApiKey.SEARCH_RECORDS, fields)


@pytest.mark.full
def test_what_retention_deletes_between_two_steps_is_skipped_and_named(embedded: mansio.Broker) -> None:
    async def work() -> None:
        async with mansio.connect(embedded.address) as client:
            await client.admin.create_topic(TOPIC, partitions=1, config={"segment.bytes": "2000"})
            for _ in range(20):
                await client.publish(TOPIC, b"v" * 1000, key=KEY)
            first = await step(client, -1)
            assert [each.offset for each in first.matches] == [0]
            assert (first.next_offset, first.end_offset) == (1, 20)
            assert first.left_bytes > 15_000
            await client.publish(TOPIC, b"later", key=KEY)
            await client.admin.delete_records([mansio.TopicPartition(TOPIC, 0)], before=12)
            second = await step(client, first.next_offset, first.end_offset, matches=100)
            assert [each.offset for each in second.matches] == list(range(12, 20))
            assert [(each.first_offset, each.end_offset, each.reason) for each in second.skipped] == [
                (1, 12, DELETED)
            ]
            assert second.next_offset == second.end_offset == 20

    asyncio.run(work())


@pytest.mark.full
def test_a_process_that_is_killed_fails_the_step_and_the_next_search_starts_another(
    embedded: mansio.Broker,
) -> None:
    with mansio.blocking.connect(embedded.address) as client:
        client.admin.create_topic(TOPIC, partitions=1)
        client.publish(TOPIC, b"v", key=KEY)
        assert len(list(client.admin.traces.find(TOPIC, key=KEY))) == 1
        worker = worker_of(embedded)
        first = present(worker.pid)

        async def job_of_a_killed_process() -> None:
            def kill() -> FileJob:
                os.kill(first, signal.SIGKILL)
                os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
                return FileJob(b"{}", [])

            with pytest.raises(Unavailable, match="SIGKILL"):
                await worker.run(kill, timeout_ms=scaled(30) * 1000)

        on_loop(embedded, job_of_a_killed_process())
        assert worker.pid is None
        assert len(list(client.admin.traces.find(TOPIC, key=KEY))) == 1
        second: int = present(worker.pid)
        assert second != first
    embedded.close()
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def on_loop(broker: mansio.Broker, work: Any) -> Any:
    return broker._call(work, scaled(60))


@pytest.mark.full
def test_a_process_that_does_not_answer_is_ended(embedded: mansio.Broker) -> None:
    worker = worker_of(embedded)
    with mansio.blocking.connect(embedded.address) as client:
        client.admin.create_topic(TOPIC, partitions=1)
        client.publish(TOPIC, b"v", key=KEY)
        list(client.admin.traces.find(TOPIC, key=KEY))
        pid = present(worker.pid)

        def stop() -> FileJob:
            os.kill(pid, signal.SIGSTOP)
            return FileJob(b"{}", [])

        with pytest.raises(RequestTimedOut):
            on_loop(embedded, worker.run(stop, timeout_ms=100))
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert len(list(client.admin.traces.find(TOPIC, key=KEY))) == 1


@pytest.mark.full
def test_an_idle_process_ends(embedded: mansio.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_of(embedded)
    monkeypatch.setattr(worker, "_idle_s", 0.05)
    with mansio.blocking.connect(embedded.address) as client:
        client.admin.create_topic(TOPIC, partitions=1)
        client.publish(TOPIC, b"v", key=KEY)
        assert len(list(client.admin.traces.find(TOPIC, key=KEY))) == 1
        wait_until(lambda: worker.pid is None, scaled(20))

        def refuse() -> FileJob:
            raise NotLeaderOrFollower("the leader has moved")

        assert list(client.admin.traces.find(TOPIC, key=KEY))
        with pytest.raises(NotLeaderOrFollower):
            on_loop(embedded, worker.run(refuse, timeout_ms=scaled(30) * 1000))
        wait_until(lambda: worker.pid is None, scaled(20), "the end after a job that was refused")
        assert len(list(client.admin.traces.find(TOPIC, key=KEY))) == 1


@pytest.mark.full
def test_the_process_ends_with_a_broker_that_is_killed(tmp_path: Path) -> None:
    with served(tmp_path / "data", http=False) as broker:
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.create_topic(TOPIC, partitions=1)
            client.publish(TOPIC, b"v", key=KEY)
            assert len(list(client.admin.traces.find(TOPIC, key=KEY))) == 1
        (pid,) = children_of(broker.pid)
        broker.kill()
        wait_until(lambda: has_ended(pid), scaled(60))


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or has ended and is not waited for by its new parent."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for path in found for child in path.read_text().split()]
    return [each for each in children if b"search_process" in Path(f"/proc/{each}/cmdline").read_bytes()]


@pytest.mark.full
def test_a_time_range_bounds_what_is_read(embedded: mansio.Broker) -> None:
    """Segments of ten hours, one record an hour; the ids have the times of their records."""
    now = datetime.now(UTC).replace(microsecond=0)
    times = [now - timedelta(hours=100 - number) for number in range(100)]
    with mansio.blocking.connect(embedded.address) as client:
        config = {"segment.bytes": "12000", "retention.ms": "-1", "index.interval.bytes": "1"}
        client.admin.create_topic(TOPIC, partitions=1, config=config)
        for number, time in enumerate(times):
            own = f"{int(time.timestamp() * 1000):012x}"
            record_id = f"{own[:8]}-{own[8:]}-7000-8000-{number:012x}"
            client.publish(TOPIC, b"v" * 1000, key=KEY, headers={"mansio-id": record_id}, timestamp_ms=time)
        traces = client.admin.traces

        def searched(**wanted: Any) -> tuple[list[int], int]:
            seen: list[mansio.SearchProgress] = []
            found = list(traces.find(TOPIC, **wanted, limit=1000, on_progress=seen.append))
            return [each.offset for each in found], seen[-1].searched_bytes

        everything, all_bytes = searched(key=KEY)
        assert everything == list(range(100))
        record_bytes = all_bytes // 100
        assert searched(key=KEY, since=times[90]) == (list(range(90, 100)), 10 * record_bytes)
        found, read = searched(key=KEY, until=times[9])
        assert found == list(range(10))
        assert read <= 12 * record_bytes
        own = f"{int(times[95].timestamp() * 1000):012x}"
        found, read = searched(record_id=f"{own[:8]}-{own[8:]}-7000-8000-{95:012x}")
        assert found == [95]
        assert read == 5 * record_bytes
        assert searched(record_id=f"{own[:8]}-{own[8:]}-7000-8000-{3:012x}") == ([], 5 * record_bytes)


@pytest.mark.full
def test_who_may_not_read_the_topic_finds_nothing() -> None:
    with TestBroker(authorizer="acl") as broker:
        rights = RecordRights(broker)
        rights.allow_everything()
        broker.client().admin.create_topic(TOPIC, partitions=1)
        broker.client().publish(TOPIC, b"v", key=KEY)
        assert len(list(broker.client().admin.traces.find(TOPIC, key=KEY))) == 1
        rights.allow_nothing()
        with pytest.raises((TopicAuthorizationFailed, UnknownTopicOrPartition)):
            list(broker.client().admin.traces.find(TOPIC, key=KEY))
        rights.allow(ResourceType.TOPIC, TOPIC, Operation.DESCRIBE, Operation.WRITE)
        with pytest.raises(TopicAuthorizationFailed):
            list(broker.client().admin.traces.find(TOPIC, key=KEY))


@pytest.mark.full
def test_searches_that_wait_are_bounded(broker: TestBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    service = present(broker._running()._service).record_search
    broker.client().publish(TOPIC, b"v", key=KEY, partition=0)
    query = RecordQuery(KEY.encode(), None, -1, -1, -1, FAR, 10, 1_000)

    def search(changed: RecordQuery) -> Any:
        return broker._call(service.search(TOPIC, 0, changed, caller=caller()), scaled(20))

    assert [offset for offset, _ in search(query).matches] == [0]
    for wrong in (
        query._replace(key=None),
        query._replace(record_id="both"),
        query._replace(key=bytes(record_search.KEY_BYTES_MAX + 1)),
        query._replace(wait_ms_max=record_search.STEP_MS_MAX + 1),
        query._replace(matches_max=record_search.MATCHES_MAX + 1),
        query._replace(matches_max=0),
    ):
        with pytest.raises(InvalidRequest):
            search(wrong)
    monkeypatch.setattr(record_search, "WAITING_MAX", 0)
    with pytest.raises(ThrottlingQuotaExceeded, match="searches wait"):
        search(query)


def caller() -> Caller:
    from mansio.broker.routing.caller import BROKER_SESSION, Caller

    return Caller(BROKER_SESSION, "test", "127.0.0.1")
