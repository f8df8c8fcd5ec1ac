"""Generator of docs/reference/features.md: every feature in one line, and whether a test shows it.

A row is done when a test exercises it over a real connection and carries `@pytest.mark.row("L5")`; the table is
generated from those marks. A row without a mark is listed as planned. The marks are read from the syntax of the
tests; nothing is imported or run.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"

FEATURES = {
    "Log": {
        "L1": "Topics with N partitions: create, list, describe, alter, add partitions, delete; optional auto-creation",
        "L2": "Records with key, value, headers, timestamp; binary safe, empty and null are distinct",
        "L3": "Append-only segments with offset and time index, rebuilt when damaged",
        "L4": "acks=0, 1 and all: no response, written to the page cache, flushed to disk",
        "L5": "After kill -9 or power loss the tail is verified; nothing acknowledged with acks=all is lost",
        "L6": "Retention by time and bytes, per topic; DeleteRecords",
        "L7": "Compaction: the latest record per key, with tombstones",
        "L8": "Compression gzip, snappy, lz4, zstd end to end, stored as sent",
        "L9": "Zero-copy reads",
        "L10": "Full disk or failed fsync: writes are refused with a typed error, reads continue",
    },
    "Producing": {
        "P1": "Keys go to the partition every Kafka client would choose (murmur2)",
        "P2": "Batching by size and linger, with a result per message",
        "P3": "Idempotent producers: retries never duplicate, also over restarts; deduplication by id in a window",
        "P4": "Transactions over partitions and offsets",
        "P5": "Invalid input gets a typed error; the other batches of the request are not affected",
    },
    "Consumer groups": {
        "G1": "Classic groups with every client: join, rebalance, cooperative, static members",
        "G2": "The broker-side groups of KIP-848",
        "G3": "Partitions that do not move are delivered without a pause during a rebalance",
        "G4": "Offsets committed, fetched, reset, deleted; they survive a restart; lag is visible",
    },
    "Delivery": {
        "D1": "Share groups (KIP-932): many consumers on a partition, accept / release / reject",
        "D2": "Leases with expiry and extension; a late ack is refused",
        "D3": "Retry with backoff, without delaying other records",
        "D4": "Dead-letter topics, with redrive",
        "D5": "Acknowledged records stay in the log; lease state survives restarts",
        "D6": "Delayed and recurring records, for every kind of consumer",
        "D7": "Priorities without starvation",
        "D8": "Client styles: in order, parallel, by key",
        "D9": "Limits and fairness by key: leased records of a key at once, its deliveries per second, its backlog",
    },
    "History and observability": {
        "T1": "History of any record",
        "T2": "Tracing costs at most 3 % of throughput",
        "T3": "Replay from any point in time without moving a group",
        "T4": "Replay from the archive after retention",
        "T5": "Metrics, trace context, probes that detect a stalled event loop",
        "T6": "Hot partitions: detection, explanation, remedy",
        "T7": "A web console",
        "T8": "`mansio why GROUP`: what keeps a group from going on, with the remedy",
    },
    "Cluster": {
        "C1": "Leader election by etcd; replication with an in-sync set",
        "C2": "Any minority may fail: nothing acknowledged is lost",
        "C3": "Brokers join and leave without a restart; throttled rebalance",
        "C4": "Any broker answers; requests are routed to the leader",
        "C5": "Groups, offsets, leases and idempotent producers survive the failure of their broker",
        "C6": "Rolling restart and upgrade without a failed produce",
        "C7": "A second data centre with translated offsets",
    },
    "Spark": {
        "S0": "The user's own pipeline: topic to topic or table",
        "S1": "Read a topic as a batch and as a stream",
        "S2": "Write exactly once",
        "S3": "Archive a topic to an Iceberg table",
        "S4": "Archive and live log in one read",
        "S5": "Replay of an Iceberg snapshot of the archive into a topic",
        "S6": "Dead-letter triage and redrive",
        "S7": "Trace analytics: deliveries as a table, percentiles of waits",
        "S8": "Hot keys and skew",
        "S9": "Compaction at scale",
        "S10": "Mirror",
        "S11": "Pipeline lag per partition (`mansio pipeline lag`)",
        "S12": "Schema check",
        "S13": "A share group as a source: more tasks than partitions, retries and dead letters of rows",
    },
    "Operating": {
        "O1": "Every setting by flag, environment or file; unknown ones are errors; the origin of each value is shown",
        "O2": "One process per data directory; several processes as brokers of one cluster",
        "O3": "Stuck transactions, unacknowledged records and the disk watermark raise alarms",
    },
    "Protocols": {
        "A1": "Kafka's protocol for librdkafka, kafka-python, aiokafka, Java, Spark, unchanged",
        "A2": "gRPC",
        "A3": "HTTP and JSON, described by OpenAPI",
        "A4": "SQS-compatible endpoint",
        "A5": "Python client, asyncio and blocking; a pytest fixture with the real broker",
        "A6": "Command line, with JSON output",
        "A7": "Schema registry",
        "A8": "TLS, authentication, access control, quotas",
        "A9": "Container image, Helm chart, systemd unit",
    },
}


PARTLY = {
    "L9": "sendfile to other machines; on loopback one copy, which is faster (ADR 4)",
    "P2": "over the Kafka protocol, by Mansio's client",
    "G3": "librdkafka occasionally pauses all fetches of a member while it revokes some partitions",
    "D1": "acquiring records one at a time is slow, batches are fast",
    "T3": "by time or offset, with the client and the command line",
    "T5": "trace context in Mansio's Python client, its transport for Celery and its pipelines",
    "T2": "for publishers that alternate with single records an append costs 20 % more; for one publisher and for "
    "batches the measurement is not exact enough",
    "T6": "by records published, not read; keys are sampled; leaders are moved on request",
    "A1": "confluent-kafka, kcat, kafka-python, aiokafka; Java and Spark's connector in the nightly tests",
    "A6": "serve, dev-cluster, cluster, topic, produce, consume, trace, group, why, dlq, delayed, schedule, quota, "
    "user, acl, token, pipeline, config, context, data, doctor, mcp, demo",
    "A9": "a systemd unit; container images, which are not run by Docker or Podman in the tests; no Helm chart",
}
"""Rows of which only a part holds today, and which part."""


_INTRODUCTION = """\
# Features

A feature is listed when a test exercises it over a real connection. The last column is the number of those tests;
`make format` generates this page from their marks.
"""


class Mark(NamedTuple):
    """A test that shows rows: where it is, which, and whether `make test` runs it."""

    file: Path
    test: str
    rows: tuple[str, ...]
    in_make_test: bool


def known_rows() -> set[str]:
    return {row for rows in FEATURES.values() for row in rows}


def _rows_of(expression: ast.expr) -> tuple[str, ...]:
    """The rows in `pytest.mark.row("L1", "L2")`, or in a list of marks; empty for any other expression."""
    if isinstance(expression, ast.List | ast.Tuple):
        return tuple(row for element in expression.elts for row in _rows_of(element))
    if not isinstance(expression, ast.Call) or ast.unparse(expression.func) != "pytest.mark.row":
        return ()
    return tuple(str(argument.value) for argument in expression.args if isinstance(argument, ast.Constant))


def _is_full(expression: ast.expr) -> bool:
    """Whether it is `pytest.mark.full`, or a list of marks with it."""
    if isinstance(expression, ast.List | ast.Tuple):
        return any(map(_is_full, expression.elts))
    return ast.unparse(expression) == "pytest.mark.full"


@cache
def marks(directory: Path = TESTS) -> list[Mark]:
    """Every test under `directory` that carries a row, by its own mark, its class's or its module's."""
    found = []
    for file in sorted(directory.rglob("test_*.py")):
        text = file.read_text()
        if "mark.row" not in text:  # parsing takes seconds
            continue
        is_selected = file.relative_to(directory).parts[0] != "nightly"
        found += [
            Mark(file, test, rows, is_selected and not is_full)
            for test, rows, is_full in _tests(ast.parse(text).body, (), is_full=False)
            if rows
        ]
    return found


def _tests(
    body: list[ast.stmt], outer: tuple[str, ...], *, is_full: bool
) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    for statement in body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark":
            outer += _rows_of(statement.value)
            is_full |= _is_full(statement.value)
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            rows = outer + tuple(row for mark in statement.decorator_list for row in _rows_of(mark))
            full = is_full or any(map(_is_full, statement.decorator_list))
            if isinstance(statement, ast.ClassDef):
                yield from _tests(statement.body, rows, is_full=full)
            elif statement.name.startswith("test_"):
                yield statement.name, rows, full


def without_smoke_case(found: Sequence[Mark]) -> set[str]:
    """The rows that a test shows, and none of those in `make test`."""
    shown = {row for mark in found for row in mark.rows}
    return shown - {row for mark in found if mark.in_make_test for row in mark.rows}


def document() -> str:
    """docs/reference/features.md, as Markdown."""
    tests: dict[str, int] = defaultdict(int)
    for mark in marks():
        for row in set(mark.rows):
            tests[row] += 1
    lines = ["| | feature | tests |", "|---|---|---|"]
    planned = []
    for area, rows in FEATURES.items():
        done = [row for row in rows if tests[row]]
        if done:
            lines.append(f"| | **{area}** | |")
        lines += [f"| {row} | {rows[row]}{_part(row)} | {tests[row]} |" for row in done]
        missing = [f"{rows[row]} ({row})" for row in rows if not tests[row]]
        if missing:
            planned.append(f"* **{area}**: {'; '.join(missing)}.")
    return "\n".join([_INTRODUCTION, *lines, "", "## Planned", "", *planned, ""])


def _part(row: str) -> str:
    return f". *So far: {PARTLY[row]}*" if row in PARTLY else ""
