"""Progress of a pipeline: from Spark's events, through the metadata of offsets, to metrics over HTTP."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mansio.errors import ConfigError
from mansio.pipelines.pipeline_metrics import MetricsEndpoint, PipelineMetrics, parse_metrics_address
from mansio.pipelines.pipeline_progress import (
    ERROR_CHARACTERS_MAX,
    FAILED,
    STOPPED,
    PipelineProgress,
    commits_with_holds,
    newest_progress,
    parse_progress,
    progress_of_batch,
)
from mansio.wire.internal_records.hold_metadata import encode_hold_metadata, parse_hold_metadata
from mansio.wire.topic_partition import TopicPartition

EVENT: dict[str, Any] = {
    "id": "7c4d2a5e-0000-0000-0000-000000000000",
    "name": "late",
    "timestamp": "2013-01-01T10:00:00.000Z",
    "batchId": 4,
    "numInputRows": 120,
    "inputRowsPerSecond": 12.3371,
    "processedRowsPerSecond": "NaN",
    "durationMs": {"addBatch": 900, "triggerExecution": 1500},
    "eventTime": {"max": "2013-01-01T09:59:00.000Z", "watermark": "2013-01-01T09:30:00.250Z"},
    "stateOperators": [
        {"numRowsTotal": 7, "memoryUsedBytes": 1000, "numRowsDroppedByWatermark": 2},
        {"numRowsTotal": 5, "memoryUsedBytes": 24, "numRowsDroppedByWatermark": 1},
    ],
}
FULL = PipelineProgress(
    batch=4,
    at_ms=9_000,
    records=120,
    seconds=1.5,
    input_per_s=12.34,
    processed_per_s=0.0,
    state_rows=12,
    state_bytes=1024,
    late_rows=3,
    watermark_ms=1_357_032_600_250,
)


def test_progress_is_that_of_sparks_event_and_survives_the_metadata_of_an_offset() -> None:
    assert progress_of_batch(EVENT, 9_000) == FULL
    for progress in (FULL, FULL.with_end(None), FULL.with_end("no\n luck"), PipelineProgress(0, 1)):
        hold = parse_hold_metadata(encode_hold_metadata("query", progress.to_json()))
        assert hold is not None
        assert parse_progress(hold.progress) == progress
        assert parse_progress(replace(progress, reported_ms=7).to_json()) == replace(progress, reported_ms=7)
    assert FULL.with_end(None).ended == STOPPED
    assert (FULL.with_end("no\n luck").ended, FULL.with_end("no\n luck").error) == (FAILED, "no luck")
    start_of_a_query = {"batchId": 0, "eventTime": {"watermark": "1970-01-01T00:00:00.000Z"}}
    assert progress_of_batch(start_of_a_query, 5) == PipelineProgress(0, 5)


def test_late_rows_are_counted_over_all_batches_once() -> None:
    next_batch = PipelineProgress(5, 9_100, late_rows=4)
    assert next_batch.after(FULL).late_rows == FULL.late_rows + 4
    assert FULL.after(FULL) == FULL
    assert FULL.after(next_batch) == next_batch, "an event that comes late"
    assert FULL.with_end(None).after(FULL) == FULL.with_end(None)


def test_metadata_stay_small_and_unknown_ones_are_ignored() -> None:
    worst = FULL.with_end("é" * 10_000)
    assert len(worst.error or "") == ERROR_CHARACTERS_MAX
    text = encode_hold_metadata("q" * 1_000, worst.to_json())
    assert len(text) <= 4_096
    hold = parse_hold_metadata(text)
    assert hold is not None
    assert hold.progress is not None, "an error of the maximum length fits"
    too_long = parse_hold_metadata(encode_hold_metadata("query", {"error": "é" * 4_096}))
    assert too_long is not None
    assert (too_long.query, too_long.progress) == ("query", None)
    for wrong in (None, {}, {"batch": "4", "at_ms": 1}, {"batch": True, "at_ms": 1}):
        assert parse_progress(wrong) is None
    odd = {"batch": 1, "at_ms": 2, "records": "7", "seconds": float("inf"), "later": 1, "error": 5}
    assert parse_progress(odd) == PipelineProgress(1, 2)
    other_form = json.dumps({"hold": 1, "query": "q", "progress": [1]})
    assert parse_hold_metadata(other_form) == ("q", None)


def test_one_partition_carries_the_progress_and_the_newest_one_counts() -> None:
    offsets = {TopicPartition("t", 1): 5, TopicPartition("t", 0): 3, TopicPartition("u", 0): 0}
    commits = commits_with_holds(offsets, "query", FULL)
    assert {place: commit.offset for place, commit in commits.items()} == offsets
    holds = {place: parse_hold_metadata(commit.metadata) for place, commit in commits.items()}
    assert [place for place, hold in holds.items() if hold is not None and hold.progress is not None] == [
        TopicPartition("t", 0)
    ]
    assert all(hold is not None and hold.query == "query" for hold in holds.values())
    metadata = [commit.metadata for commit in commits.values()]
    older = encode_hold_metadata("", PipelineProgress(9, FULL.at_ms - 1).to_json())
    assert newest_progress([older, *metadata, "", "of another client"]) == FULL
    assert newest_progress(["", encode_hold_metadata("query")]) is None
    assert commits_with_holds({}, "query", FULL) == {}


def scrape(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as response:
        return str(response.read().decode())


def test_metrics_are_served_in_prometheus_form() -> None:
    metrics = PipelineMetrics("late")
    endpoint = MetricsEndpoint(metrics, "127.0.0.1", 0)
    try:
        assert "mansio_pipeline_batches_total" in scrape(endpoint.address)
        metrics.observe_batch(FULL, {"flights": 30, "weather": 0})
        metrics.observe_batch(PipelineProgress(5, 10_000, records=1, late_rows=1), None)
        metrics.observe_restart()
        metrics.observe_commit_failure()
        values = {
            (sample.name, sample.labels.get("topic", "")): sample.value
            for family in text_string_to_metric_families(scrape(endpoint.address))
            for sample in family.samples
            if sample.labels["pipeline"] == "late"
        }
        expected = {
            "batches_total": 2,
            "records_total": 121,
            "late_rows_total": 4,
            "restarts_total": 1,
            "offset_commit_failures_total": 1,
            "batch_records": 1,
            "state_rows": 0,
            "last_commit_timestamp_seconds": 10,
        }
        assert {name: values[f"mansio_pipeline_{name}", ""] for name in expected} == expected
        assert values["mansio_pipeline_lag_records", "flights"] == 30, "the last known one"
        assert ("mansio_pipeline_watermark_timestamp_seconds", "") not in values
        metrics.observe_batch(FULL, None)
        assert "mansio_pipeline_watermark_timestamp_seconds" in scrape(endpoint.address)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scrape(endpoint.address, "/other")
        with pytest.raises(ConfigError, match="cannot be served on 127"):
            MetricsEndpoint(metrics, *parse_metrics_address(endpoint.address))
    finally:
        endpoint.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(parse_metrics_address(endpoint.address), timeout=30)


def test_client_that_sends_nothing_does_not_stop_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mansio.pipelines.pipeline_metrics._MetricsHandler.timeout", 0.2)
    endpoint = MetricsEndpoint(PipelineMetrics("p"), "127.0.0.1", 0)
    try:
        with socket.create_connection(parse_metrics_address(endpoint.address)):
            assert "mansio_pipeline_batches_total" in scrape(endpoint.address)
    finally:
        endpoint.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (":0", ("127.0.0.1", 0)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_metrics_without_a_host_are_for_this_machine(text: str, address: tuple[str, int]) -> None:
    assert parse_metrics_address(text) == address
    for wrong in ("", "host", "host:", "host:70000", "host:-1"):
        with pytest.raises(ValueError, match="is not HOST:PORT"):
            parse_metrics_address(wrong)
