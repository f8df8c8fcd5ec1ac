# ruff: noqa: N802  # names as Spark calls them
"""What differs between versions of Spark: the adapter of 4.1, driven by a model of its calls, and texts of offsets."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import ConfigError
from mansio.host.extras import EXTRAS
from mansio.spark import spark_versions
from mansio.spark.spark_versions import (
    SUPPORTED_VERSIONS,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    StreamReaderWithoutArguments,
    check_spark_version,
    parse_progress_offsets,
)
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition

Offsets = dict[str, Any]


class LogReader:
    """A reader of a log of one partition, with the interface of Spark 4.2: only its length counts."""

    def __init__(self, log: list[int], rows_max: int | None) -> None:
        self._log = log
        self._rows_max = rows_max
        self.stopped = False

    def initialOffset(self) -> Offsets:
        return {"t": {"0": 0}}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable() if self._rows_max is None else ReadMaxRows(self._rows_max)

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        end = len(self._log)
        if isinstance(limit, ReadMaxRows):
            end = min(end, start["t"]["0"] + limit.max_rows)
        return {"t": {"0": end}}

    def reportLatestOffset(self) -> Offsets | None:
        return {"t": {"0": len(self._log)}}

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        return ()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError

    def commit(self, end: Offsets) -> None: ...

    def stop(self) -> None:
        self.stopped = True


@dataclass
class Spark41:
    """The calls of Spark 4.1 to the reader of one source, with its checkpoint; offsets are texts in between."""

    log: list[int]
    rows_max: int | None
    offset_log: list[str] = field(default_factory=list)
    committed: int = 0
    """Number of batches in the commit log."""
    batches: dict[int, list[int]] = field(default_factory=dict)

    def start(self) -> None:
        self.reader = StreamReaderWithoutArguments(LogReader(self.log, self.rows_max))
        if self.offset_log:
            seen = json.loads(self.offset_log[-1])
            self.reader.partitions(seen, seen)
            if self.committed < len(self.offset_log):
                self._run(self.committed)

    def trigger(self, dies: str = "") -> bool:
        """One trigger; whether it ran a batch. `dies`: the step before which the process is killed."""
        end = json.dumps(self.reader.latestOffset())
        if end == (self.offset_log[-1] if self.offset_log else json.dumps(self.reader.initialOffset())):
            return False
        if dies == "offset":
            self.start()
            return True
        self.offset_log.append(end)
        if dies == "batch":
            self.start()
            return True
        self._run(len(self.offset_log) - 1, is_committed=dies != "commit")
        if dies == "commit":
            self.start()
        return True

    def _run(self, number: int, *, is_committed: bool = True) -> None:
        start = json.loads(self.offset_log[number - 1]) if number else self.reader.initialOffset()
        end = json.loads(self.offset_log[number])
        self.reader.partitions(start, end)
        self.batches[number] = self.log[start["t"]["0"] : end["t"]["0"]]
        if is_committed:
            self.committed = number + 1


steps = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(["", "", "", "offset", "batch", "commit", "restart"])),
    max_size=30,
)


@given(steps, st.none() | st.integers(1, 15))
def test_spark_without_limits_reads_each_record_once_in_batches_within_the_limit(
    history: list[tuple[int, str]], rows_max: int | None
) -> None:
    log: list[int] = []
    spark = Spark41(log, rows_max)
    spark.start()
    for appended, dies in history:
        log.extend(range(len(log), len(log) + appended))
        if dies == "restart":
            spark.start()
        else:
            spark.trigger(dies)
    while spark.trigger():
        pass
    assert [record for number in sorted(spark.batches) for record in spark.batches[number]] == log
    assert all(0 < len(batch) <= (rows_max or len(log)) for batch in spark.batches.values())


@pytest.mark.parametrize(("triggers", "rows_max", "warns"), [(1, 10, True), (1, 20, False), (2, 5, False)])
def test_query_that_stops_after_one_of_several_batches_is_warned_of_its_trigger(
    caplog: pytest.LogCaptureFixture, triggers: int, rows_max: int, warns: bool
) -> None:
    reader = LogReader(list(range(20)), rows_max)
    adapted = StreamReaderWithoutArguments(reader)
    for _ in range(triggers):
        adapted.latestOffset()
    with caplog.at_level(logging.WARNING):
        adapted.stop()
    assert ("start_available_now" in caplog.text) == warns
    assert reader.stopped


@pytest.mark.parametrize("version", ["4.1.0", "4.2.1", "4.3.0.dev0"])
def test_supported_versions_are_accepted(version: str) -> None:
    check_spark_version(version)


@pytest.mark.parametrize("version", ["3.5.6", "4.0.1", "4.4.0", "5.1.0", "?"])
def test_other_versions_are_refused_with_the_remedy(version: str) -> None:
    with pytest.raises(ConfigError, match=r"Mansio supports 4\.1 to 4\.3: pip install 'pyspark"):
        check_spark_version(version)


def test_supported_versions_are_those_that_pip_installs() -> None:
    lowest, highest = SUPPORTED_VERSIONS[0], SUPPORTED_VERSIONS[-1]
    wanted = f'"pyspark[sql,pipelines]>={lowest[0]}.{lowest[1]},<{highest[0]}.{highest[1] + 1}"'
    assert wanted in (ROOT / "pyproject.toml").read_text()
    assert "pyspark" in EXTRAS["spark"]


def test_newer_versions_get_the_reader_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_versions, "HAS_ADMISSION_CONTROL", False)
    assert isinstance(spark_versions.adapt_stream_reader(LogReader([], None)), StreamReaderWithoutArguments)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"t": {"0": 5}}', {"t": {"0": 5}}),
        ("{'t': {'0': 5}, '': {'t': {'0': 1}}}", {"t": {"0": 5}, "": {"t": {"0": 1}}}),  # PySpark 4.1
        ("None", None),
        ("null", None),
        ("", None),
        (None, None),
        ("{'t'", None),
        ("__import__('os')", None),
    ],
)
def test_offsets_of_a_query_are_read_from_json_and_from_the_text_of_a_dictionary(
    text: str | None, found: object
) -> None:
    assert parse_progress_offsets(text) == found
