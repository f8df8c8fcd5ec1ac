"""An archive opened by pyiceberg alone: the printed line, and the names that it contains."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.catalog.rest import RestCatalog

from mansio.iceberg.archive.open_elsewhere import (
    SHOWN_ROWS,
    SPARK_RUNTIME_PACKAGE,
    SQLITE_DRIVER_PACKAGE,
    open_elsewhere,
)
from support.archive_tables import Archive
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from pyiceberg.table import Table

TOPICS = ("flights", "late-flights.2013")


@pytest.fixture(params=TOPICS)
def table(tmp_path: Path, request: pytest.FixtureRequest) -> Table:
    """An archive of two partitions."""
    made = Archive(tmp_path / "lake", topic=request.param)
    opened = made.open()
    made.add(opened, {0: 30, 1: 12})
    return opened.iceberg


def line(table: Table, engine: str) -> str:
    """The printed line of an engine, as it is pasted there."""
    found = next(one for one in open_elsewhere(table) if one.startswith(engine))
    return found.partition(": ")[2]


@pytest.mark.full
def test_pyiceberg_line_reads_the_table_as_printed(table: Table) -> None:
    statement, _, expression = line(table, "pyiceberg").partition("; ")
    namespace: dict[str, Any] = {}
    exec(statement, namespace)
    rows: pa.Table = eval(expression, namespace)
    assert rows.num_rows == SHOWN_ROWS
    assert rows.schema.names[:2] == ["key", "value"]


def test_spark_line_names_catalog_namespace_and_table(table: Table) -> None:
    """`tests/nightly/spark/test_plain_spark.py` runs it."""
    words = shlex.split(line(table, "Spark 4.1"))
    lake = table.catalog.properties["warehouse"]
    assert words[:3] == ["spark-sql", "--packages", f"{SPARK_RUNTIME_PACKAGE},{SQLITE_DRIVER_PACKAGE}"]
    assert f"spark.sql.catalog.mansio.uri=jdbc:sqlite:{lake.removeprefix('file://')}/catalog.db" in words
    assert f"spark.sql.catalog.mansio.warehouse={lake}" in words
    assert words[-1] == f"SELECT * FROM `mansio`.`mansio`.`{table.name()[1]}` LIMIT {SHOWN_ROWS}"
    assert SPARK_RUNTIME_PACKAGE in (ROOT / "docs/how-to/lake-engines.md").read_text()


def test_lines_of_a_rest_catalog_have_no_credentials(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = RestCatalog.__new__(RestCatalog)
    catalog.name = "prod"
    catalog.properties = {
        "uri": "https://user:secret@lake.example/api?token=secret",
        "token": "secret",
        "credential": "id:secret",
        "warehouse": "s3://bucket/lake",
    }
    monkeypatch.setattr(table, "catalog", catalog)
    found = open_elsewhere(table)
    assert "secret" not in " ".join(found)
    assert "spark.sql.catalog.prod.type=rest" in found[0]
    assert "spark.sql.catalog.prod.uri=https://lake.example/api" in found[0]
    assert SQLITE_DRIVER_PACKAGE not in found[0]
    assert "load_catalog('prod', type='rest', uri='https://lake.example/api'" in found[1]
