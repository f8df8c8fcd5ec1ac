"""An archive opened by DuckDB, with its Iceberg extension from the package index: the printed line, and the examples of
docs/how-to/lake-engines.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import duckdb_extension_avro
import duckdb_extension_iceberg
import pytest

from mansio.iceberg.archive.open_elsewhere import SHOWN_ROWS, open_elsewhere
from support.archive_tables import Archive, row
from support.documents import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.iceberg.archive.table import ArchiveTable

COUNTS = {0: 30, 1: 12}

pytestmark = pytest.mark.full


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckDB with the extensions that the packages contain, so that `INSTALL` downloads nothing."""
    made = duckdb.connect(config={"extension_directory": str(tmp_path / "extensions")})
    for package in (duckdb_extension_avro, duckdb_extension_iceberg):
        (file,) = Path(str(package.__file__)).parent.glob("extensions/*/*.duckdb_extension")
        made.install_extension(str(file))
    yield made
    made.close()


def archive(place: Path, topic: str) -> ArchiveTable:
    made = Archive(place / "lake", topic=topic)
    table = made.open()
    made.add(table, {0: 20, 1: 12})
    made.add(table, {0: 10})
    return table


@pytest.mark.parametrize("topic", ["flights", "late-flights.2013"])
def test_duckdb_line_reads_the_table_as_printed(
    tmp_path: Path, topic: str, connection: duckdb.DuckDBPyConnection
) -> None:
    table = archive(tmp_path, topic)
    text = open_elsewhere(table.iceberg)[2].removeprefix("DuckDB: ")
    assert len(connection.sql(text).fetchall()) == SHOWN_ROWS

    everything = text.partition("SELECT")[2].replace(f" LIMIT {SHOWN_ROWS};", "")
    found = connection.sql(f"SELECT {everything} ORDER BY __partition, __offset").to_arrow_table()
    wanted = [row(partition, offset) for partition, count in COUNTS.items() for offset in range(count)]
    for name in ("key", "value", "headers", "__partition", "__offset"):
        assert found[name].to_pylist() == [one[name] for one in wanted], name


def test_examples_of_the_document_read_an_archive(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    connection: duckdb.DuckDBPyConnection,
) -> None:
    archive(tmp_path, "flights")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(duckdb, "sql", connection.sql)
    installed: list[str] = []
    monkeypatch.setattr(duckdb, "install_extension", installed.append)
    found = examples("docs/how-to/lake-engines.md")
    assert list(found) == ["pyiceberg", "duckdb", "duckdb-packages", "duckdb-arrow"]
    namespace: dict[str, Any] = {}
    for name, example in found.items():
        exec(example.code, namespace)
        shown = capsys.readouterr().out
        if name == "pyiceberg":
            assert "__offset" in shown
        elif name == "duckdb-packages":
            assert [Path(one).stem for one in installed] == ["avro", "iceberg"]
        else:
            assert all(f" {count} " in shown for count in COUNTS.values()), f"{name}:\n{shown}"
