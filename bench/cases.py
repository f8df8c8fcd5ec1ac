"""Cases of `make bench`: load, reference and required ratio of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Side = Literal["baseline", "baseline sync", "mansio", "mansio one partition"]


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement.

    `load` are arguments of `bench.load`. `figure` is the field of its result that is compared, in `unit`.
    `against` is measured in turn with Mansio and is the denominator; None: Mansio alone, no ratio.
    `ratio_min` is what the project holds itself to. `fill`: the load that puts records there first.
    """

    name: str
    title: str
    load: tuple[str, ...]
    figure: str = "requests_per_s"
    unit: str = "requests/s"
    against: Side | None = "baseline"
    ratio_min: float | None = None
    partitions: int = 1
    fill: tuple[str, ...] | None = None


def _produce(*arguments: str) -> tuple[str, ...]:
    return ("produce", *arguments)


FILL = _produce(
    "--depth", "4", "--records", "100", "--size", "1000", "--bytes", str(8 << 20), "--warm-up", "0"
)
"""Eight megabytes, for fetches of one."""
BACKLOG = _produce("--depth", "4", "--records", "100", "--bytes", str(40 << 20), "--warm-up", "0")
"""About 380,000 records for share group members; each is acquired once."""

CASES = (
    Case(
        "produce-1",
        "produce, 1 record of 100 B",
        _produce("--connections", "4", "--depth", "32"),
    ),
    Case(
        "produce-100",
        "produce, 100 records of 100 B",
        _produce("--connections", "4", "--depth", "8", "--records", "100"),
        ratio_min=0.5,
    ),
    Case(
        "produce-1000",
        "produce, 1000 records of 100 B",
        _produce("--connections", "4", "--depth", "4", "--records", "1000"),
        ratio_min=0.5,
    ),
    Case(
        "produce-100-1k",
        "produce, 100 records of 1 KB",
        _produce("--connections", "4", "--depth", "4", "--records", "100", "--size", "1000"),
        ratio_min=0.5,
    ),
    Case(
        "fetch",
        "fetch, 1 MB a request",
        ("fetch", "--connections", "4", "--depth", "2"),
        figure="megabytes_per_s",
        unit="MB/s",
        ratio_min=0.6,
        fill=FILL,
    ),
    Case(
        "acks-all-1",
        "acks=all, 1 connection",
        _produce("--acks", "-1"),
        against="baseline sync",
        ratio_min=0.7,
    ),
    Case(
        "acks-all-8",
        "acks=all, 8 connections",
        _produce("--acks", "-1", "--connections", "8"),
        against="baseline sync",
        ratio_min=0.7,
    ),
    Case(
        "acks-all-64",
        "acks=all, 64 connections",
        _produce("--acks", "-1", "--connections", "64"),
        against="baseline sync",
        ratio_min=0.7,
    ),
    Case(
        "partitions-256",
        "acks=all over 256 partitions against one",
        _produce("--acks", "-1", "--connections", "64", "--depth", "4"),
        against="mansio one partition",
        ratio_min=0.5,
        partitions=256,
    ),
    Case(
        "deliver",
        "publish to deliver, 1,000/s, acks=all",
        ("deliver", "--acks", "-1", "--rate", "1000"),
        figure="p50_us",
        unit="us",
        against=None,
    ),
    Case(
        "lease-100",
        "lease and accept, 100 at a time",
        ("share", "--records", "100", "--depth", "2"),
        figure="records_per_s",
        unit="records/s",
        against=None,
        fill=BACKLOG,
    ),
    Case(
        "lease-1",
        "lease and accept, one at a time",
        ("share",),
        figure="records_per_s",
        unit="records/s",
        against=None,
        fill=FILL,
    ),
)
