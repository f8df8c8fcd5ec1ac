"""Commands that read an archive, without Spark and without a broker: records are printed byte for byte."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from mansio.cli.main import main
from support.archive_tables import FIRST_US, Archive, row
from support.machine import scaled
from support.paths import mansio_command

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.iceberg.archive.table import ArchiveTable

NO_BROKER = ("--bootstrap-servers", "127.0.0.1:1")


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "warehouse")


@pytest.fixture
def table(archive: Archive) -> ArchiveTable:
    table = archive.open()
    archive.add(table, {0: 10, 1: 5})
    archive.add(table, {0: 10})
    return table


def consume(archive: Archive, *arguments: str) -> tuple[int, bytes, str]:
    """(exit code, standard output, standard error) of `mansio consume` on the archive, in a process of its own."""
    command = [
        *mansio_command(),
        "consume",
        "flights",
        "--warehouse",
        str(archive.warehouse),
        *NO_BROKER,
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, timeout=scaled(60), check=False)
    return done.returncode, done.stdout, done.stderr.decode()


def look(
    capfdbinary: pytest.CaptureFixture[bytes], archive: Archive, *arguments: str
) -> list[dict[str, Any]]:
    """The records that `mansio consume -o json` prints."""
    given = ["consume", "flights", "--warehouse", str(archive.warehouse), "--include-deleted", "-o", "json"]
    with pytest.raises(SystemExit) as ended:
        main([*given, *NO_BROKER, *arguments])
    assert ended.value.code == 0
    return [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]


def places(found: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(one["partition"], one["offset"]) for one in found]


@pytest.mark.usefixtures("table")
def test_values_are_printed_as_of_a_topic_and_no_broker_is_asked(archive: Archive) -> None:
    code, out, _ = consume(archive, "--from-snapshot", "now", "--include-deleted", "-K", "=")
    rows = [row(0, offset) for offset in range(20)] + [row(1, offset) for offset in range(5)]
    assert code == 0
    assert out == b"".join((one["key"] or b"") + b"=" + (one["value"] or b"") + b"\n" for one in rows)


def test_ids_times_partitions_and_counts_choose(
    archive: Archive, table: ArchiveTable, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    first, second = table.iceberg.metadata.snapshots
    by_id = look(capfdbinary, archive, "--from-snapshot", str(first.snapshot_id))
    assert places(by_id) == [(0, offset) for offset in range(10)] + [(1, offset) for offset in range(5)]
    assert by_id[0]["headers"] == [{"name": "trace", "value": "0"}, {"name": "trace", "value": None}]
    assert by_id[3]["timestamp_ms"] == FIRST_US // 1000 + 3000
    before = look(capfdbinary, archive, "--from-snapshot", str(second.timestamp_ms - 1))
    assert places(before) == places(by_id)
    chosen = look(capfdbinary, archive, "--from-snapshot", "now", "--partition", "0", "--max", "12")
    assert places(chosen) == [(0, offset) for offset in range(12)]
    times = ("--from-time", str(FIRST_US // 1000 + 4000), "--to-time", str(FIRST_US // 1000 + 6000))
    assert places(look(capfdbinary, archive, "--from-snapshot", "now", *times)) == [(0, 4), (0, 5), (1, 4)]
    assert look(capfdbinary, archive, "--from-snapshot", "now", "--max", "0") == []


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--from-snapshot", "9" * 19), 1, "keeps no snapshot"),
        (("--from-snapshot", "1000"), 1, "at that time are not recorded"),
        (("--from-snapshot", "yesterday"), 2, "not a snapshot's id, tag or time"),
        (("--from-snapshot", "now", "--group", "g"), 2, "an archive is read from its beginning"),
        (("--include-deleted",), 2, "requires --from-snapshot"),
    ],
)
def test_what_cannot_be_read_is_one_clear_line(
    archive: Archive, arguments: tuple[str, ...], code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["consume", "flights", "--warehouse", str(archive.warehouse), *NO_BROKER, *arguments])
    assert ended.value.code == code
    assert message in " ".join(capfd.readouterr().err.replace("│", " ").split())


def test_a_topic_is_not_replayed_into_itself_as_of_a_moment_that_moves_on(
    archive: Archive, table: ArchiveTable, capfd: pytest.CaptureFixture[str]
) -> None:
    """A second run, an hour later, would find the copies of the first in the archive, and write them again."""
    given = ["pipeline", "replay", "flights", "-w", str(archive.warehouse), "--include-deleted", *NO_BROKER]
    with pytest.raises(SystemExit) as ended:
        main([*given, "--to", table.topic, "--from-snapshot", "-2h"])
    assert ended.value.code == 2
    assert "requires a fixed version" in " ".join(capfd.readouterr().err.replace("│", " ").split())


def test_a_topic_without_an_archive_explains_how_to_make_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["consume", "t", "-w", str(tmp_path), "--from-snapshot", "now", "--include-deleted"])
    assert ended.value.code == 1
    assert "mansio pipeline archive t" in capfd.readouterr().err


def test_maintenance_from_the_command_line_keeps_rows_and_tags(
    archive: Archive, table: ArchiveTable, capfd: pytest.CaptureFixture[str]
) -> None:
    def maintain(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["pipeline", "maintain", "flights", "-w", str(archive.warehouse), *arguments])
        return ended.value.code, *capfd.readouterr()

    code, out, _ = maintain("--keep", "1", "--tag", "month-end", "-o", "json")
    report = json.loads(out)
    assert code == 0
    assert report["rewritten"]["files_replaced"] == 2
    assert (report["rows"], report["files"]) == (25, 2)
    assert report["swept"]["files_deleted"] == 0
    assert {"month-end", "main"} == set(archive.open().iceberg.metadata.refs)
    code, out, _ = maintain("--keep", "1", "--grace", "0s", "--force")
    assert code == 0
    assert "RECORDS" in out.upper()
    code, _, err = maintain("--tag", "month-end")
    assert (code, "tag or branch month-end already" in err) == (1, True)
    code, _, err = maintain("--grace", "1m")
    assert (code, "--force allows it" in " ".join(err.split())) == (2, True)
