"""Benchmark programs: their requests are valid, and the baseline server stores what it acknowledges."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from bench import frames, share_frames, share_paths
from bench.peers import mansio_broker

from mansio.wire.apis import fetch, produce, share_fetch
from mansio.wire.apis.share_acknowledge import AckBatch
from mansio.wire.batch.record_batch import check_batch
from mansio.wire.batch.record_reader import read_records
from mansio.wire.headers import read_request_header
from support.machine import scaled
from support.paths import ROOT, free_port
from support.present import present

if TYPE_CHECKING:
    from pathlib import Path

RECORDS = 10
REQUESTS = 20


def test_prebuilt_produce_requests_mean_what_they_say() -> None:
    batch = frames.batch(RECORDS, 100)
    frame = memoryview(frames.produce_request("topic", 3, -1, batch))[4:]
    header = read_request_header(frame)
    assert (header.api_key, header.api_version) == (frames.PRODUCE, frames.PRODUCE_VERSION)
    request = produce.decode_request(header.api_version, frame, header.body_position)
    assert (request.acks, request.transactional_id) == (-1, None)
    ((name, _, ((index, records),)),) = request.topics
    assert (name, index, bytes(present(records))) == ("topic", 3, batch)
    assert check_batch(batch).record_count == RECORDS
    values = [record.value for record in read_records(batch, output_bytes_max=1 << 20)]
    assert [len(value or b"") for value in values] == [100] * RECORDS


def test_prebuilt_fetch_requests_mean_what_they_say() -> None:
    frame = memoryview(frames.fetch_request("topic", 3, 42, 1 << 20))[4:]
    header = read_request_header(frame)
    request = fetch.decode_request(header.api_version, frame, header.body_position)
    ((name, _, (want,)),) = request.topics
    assert (name, want.index, want.fetch_offset, want.max_bytes) == ("topic", 3, 42, 1 << 20)
    assert request.min_bytes == 1


def test_prebuilt_share_fetches_mean_what_they_say() -> None:
    topic_id = bytes(range(16))
    fetches = share_frames.ShareFetches("group", "member", topic_id)
    for epoch, acks in enumerate([[], [(5, 9), (20, 20)]]):
        frame = memoryview(fetches.request(100, acks))[4:]
        header = read_request_header(frame)
        assert (header.api_key, header.api_version) == (share_frames.SHARE_FETCH, share_frames.VERSION)
        request = share_fetch.decode_request(header.api_version, frame, header.body_position)
        assert (request.group_id, request.member_id, request.session_epoch) == ("group", "member", epoch)
        assert (request.max_records, request.acquire_mode) == (100, share_fetch.RECORD_LIMIT)
        ((named, (partition,)),) = request.topics
        assert (named, partition.index) == (topic_id, 0)
        assert partition.batches == [AckBatch(*each, share_frames.ACCEPT) for each in acks]


def test_what_an_answer_leases_is_read_and_an_error_is_not_overlooked() -> None:
    leased = share_fetch.SharePartitionData(
        0, records_bytes=300, records=(b"r" * 300,), acquired=[(5, 9, 1), (20, 20, 3)]
    )

    def read(partition: share_fetch.SharePartitionData, error_code: int = 0) -> list[tuple[int, int]]:
        pieces = share_fetch.encode_response(2, 1, [(bytes(16), [partition])], error_code=error_code)
        return share_frames.acquired(memoryview(b"".join(pieces)))

    assert read(leased) == [(5, 9), (20, 20)]
    for bad in (leased._replace(error_code=3), leased._replace(acknowledge_error_code=121)):
        with pytest.raises(ValueError, match="error code"):
            read(bad)
    with pytest.raises(ValueError, match="123"):
        read(leased, error_code=123)


@pytest.mark.parametrize("modes", [(), ("sync",)], ids=["page-cache", "synced"])
def test_the_baseline_stored_every_byte_that_the_load_counted(tmp_path: Path, modes: tuple[str, ...]) -> None:
    port, log = free_port(), tmp_path / "log"
    baseline = subprocess.Popen(
        [sys.executable, "-m", "bench.baseline_server", str(port), str(log), *modes], cwd=ROOT
    )
    try:
        produced = load("produce", port, "--records", str(RECORDS), "--depth", "4", "--connections", "2")
        fetched = load("fetch", port, "--fetch-bytes", "1000")
        # The baseline has one thread: once it responded to later fetches, no write is in progress.
        stored = log.stat().st_size / len(frames.batch(RECORDS, 100))
        assert stored == int(stored)
        assert REQUESTS <= produced["requests"] <= stored
        rounding = RECORDS * 0.1
        assert produced["records_per_s"] == pytest.approx(
            produced["requests_per_s"] * RECORDS, rel=0.01, abs=rounding
        )
        assert fetched["requests"] >= REQUESTS
    finally:
        baseline.kill()
        baseline.wait()


def load(mode: str, port: int, *arguments: str) -> dict[str, float]:
    """A short run of the load: it ends after a number of answers, however slow the machine is."""
    command = [sys.executable, "-m", "bench.load", mode, "--port", str(port), *arguments]
    done = subprocess.run(
        [*command, "--requests", str(REQUESTS), "--seconds", "60", "--warm-up", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(90),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.full
def test_each_request_of_a_share_group_is_counted_on_its_path(tmp_path: Path) -> None:
    """One request opens the session; those that receive a record and accept the one before take the short path."""
    (candidate,) = (one for one in mansio_broker.candidates() if one.name == "mansio-own")
    counts = share_paths.measured(candidate, 1, scaled(0.2), tmp_path)
    assert counts["general"] >= 1
    assert counts["short"] >= 1
