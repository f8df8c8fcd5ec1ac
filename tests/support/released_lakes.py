"""Lakes that releases have written: an archive, result tables, checkpoints, and the broker's data they continue from.

`tests/fixtures/lakes/mansio-VERSION.tar.gz` was made once by `python -m support.released_lakes WHEEL`, which runs the
commands of that wheel in an environment of its own. Iceberg's metadata has absolute paths, so `unpack` writes the new
place into all of it: into the catalog, the metadata files, and, entry by entry, the manifests. Nothing else changes.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import fastavro
import pyarrow as pa

from mansio.iceberg.archive.table import open_table
from mansio.iceberg.archive.table_format import TABLE_SCHEMA
from mansio.iceberg.archive.table_scan import scan
from mansio.iceberg.result_table.table import open_existing_table
from support.archive_tables import rows_of
from support.environments import Environment, run
from support.paths import ROOT
from support.process import ServedBroker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.iceberg.archive.table import ArchiveTable

LAKES: Final = ROOT / "tests" / "fixtures" / "lakes"
TOPIC: Final = "orders"
PARTITIONS: Final = 2
BATCHES: Final = 3
"""Of the release: in each the records are archived, appended and upserted."""
BATCH_RECORDS: Final = 20
FIRST_US: Final = 1_700_000_000_000_000
STEP_US: Final = 3_600_000_000
JOB_DEADLINE_S: Final = 240.0
PLACE_FILE: Final = "place"
"""File with the directory in which a lake was made."""
PUBLISH: Final = """
import sys
import mansio
from mansio.client.types import OutgoingRecord
address, topic, partitions, begin, end = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
with mansio.blocking.connect(address) as client:
    if begin == 0:
        config = {"segment.bytes": "1048576", "retention.ms": "-1"}
        client.admin.create_topic(topic, partitions=partitions, config=config)
    client.publish_many(topic, [
        OutgoingRecord(
            b"%d" % number,
            key=b"k%d" % (number % 7),
            headers=[("n", b"%d" % number), ("n", None)] if number % 3 == 0 else [],
            partition=number % partitions,
            timestamp_ms=1_700_000_000_000 + number * 3_600_000,
        )
        for number in range(begin, end)
    ])
"""
APPENDED: Final = """
def transform(frame):
    number = "cast(cast(value as string) as int)"
    return frame.selectExpr(
        f"{number} as number",
        "cast(key as string) as key",
        f"timestamp_seconds({number} * 3600) as at",
        "named_struct('partition', partition, 'offset', offset) as origin",
    )
"""
UPSERTED: Final = """
def transform(frame):
    return frame.selectExpr("cast(key as string) as key", "cast(cast(value as string) as bigint) as number")
"""
APPEND_OPTIONS: Final = (
    "--to-table",
    "ns.appended",
    "--partition-by",
    "day(at), bucket(2, key)",
    "--sort-by",
    "number desc",
)
UPSERT_OPTIONS: Final = (
    "--to-table",
    "ns.upserted",
    "--mode",
    "update",
    "--key",
    "key",
    "--order-by",
    "number",
)


def records(count: int) -> list[dict[str, Any]]:
    """The first records of the topic as rows of its archive, by partition and offset."""
    rows = [
        {
            "key": b"k%d" % (number % 7),
            "value": b"%d" % number,
            "headers": [{"key": "n", "value": b"%d" % number}, {"key": "n", "value": None}]
            if number % 3 == 0
            else None,
            "__partition": number % PARTITIONS,
            "__offset": number // PARTITIONS,
            "__timestamp": FIRST_US + number * STEP_US,
        }
        for number in range(count)
    ]
    return sorted(rows, key=lambda row: (row["__partition"], row["__offset"]))


def appended_rows(count: int) -> list[dict[str, Any]]:
    """The rows of the table into which the first records were appended, by number."""
    return [
        {
            "number": number,
            "key": f"k{number % 7}",
            "at": number * STEP_US,
            "origin": {"partition": number % PARTITIONS, "offset": number // PARTITIONS},
        }
        for number in range(count)
    ]


def upserted_rows(count: int) -> list[dict[str, Any]]:
    """The rows of the table into which the first records were upserted, by key."""
    latest = {f"k{number % 7}": number for number in range(count)}
    return [{"key": key, "number": latest[key]} for key in sorted(latest)]


def archive_of(warehouse: Path) -> ArchiveTable:
    """The archive of the topic."""
    return open_table(None, str(warehouse), TOPIC)


def archived(table: ArchiveTable, offset: int | None = None) -> list[dict[str, Any]]:
    """The records of an archive as `records` has them, all or those below this offset."""
    rows = pa.Table.from_pylist(rows_of(scan(table)), TABLE_SCHEMA).drop_columns(
        ["__timestamp_type", "__lane"]
    )
    place = rows.schema.get_field_index("__timestamp")
    rows = rows.set_column(place, "__timestamp", rows["__timestamp"].cast(pa.int64()))
    return [row for row in rows.to_pylist() if offset is None or row["__offset"] < offset]


def read_result(warehouse: Path, name: str, order: str) -> list[dict[str, Any]]:
    """The rows of a result table as other programs read them; times in microseconds."""
    found = open_existing_table(name, str(warehouse), {}).iceberg.scan().to_arrow().sort_by(order)
    types = [pa.int64() if pa.types.is_timestamp(one.type) else one.type for one in found.schema]
    columns = [column.cast(kind) for column, kind in zip(found.columns, types, strict=True)]
    return pa.table(columns, found.column_names).to_pylist()


def publish_records(address: str, begin: int, end: int) -> None:
    """Publish more of the records with this source."""
    arguments = [address, TOPIC, *map(str, (PARTITIONS, begin, end))]
    run([sys.executable, "-c", PUBLISH, *arguments])


def make(wheel: Path, target: Path) -> None:
    """Let the release write a lake: each batch of records is published, archived, appended and upserted."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "lake of a release"
        environment = Environment(Path(directory) / "environment")
        environment.use_packages_of_this_interpreter()
        environment.pip("install", "--quiet", "--no-deps", "--no-index", wheel)
        command = [str(environment.bin / "python"), "-m", "mansio"]
        place.mkdir()
        for name, text in (("publish", PUBLISH), ("appended", APPENDED), ("upserted", UPSERTED)):
            (environment.place / f"{name}.py").write_text(text)
        broker = ServedBroker(place / "data", command=command, environment=environment.variables, http=False)
        broker.start()
        try:
            for batch in range(BATCHES):
                for job in _jobs(command, broker.bootstrap_servers, place, batch):
                    run(
                        job,
                        place=environment.place,
                        environment=environment.variables,
                        seconds=JOB_DEADLINE_S,
                    )
            assert broker.stop() == 0
        finally:
            broker.kill()
        (place / PLACE_FILE).write_text(str(place))
        with tarfile.open(target, "w:gz", compresslevel=9) as archive:
            for path in sorted(place.rglob("*")):
                if path.is_file() and path != broker.output:
                    archive.add(path, path.relative_to(place))


def _jobs(command: list[str], address: str, place: Path, batch: int) -> Iterator[list[str]]:
    """The commands of one batch."""
    begin = batch * BATCH_RECORDS
    numbers = map(str, (PARTITIONS, begin, begin + BATCH_RECORDS))
    yield [command[0], "publish.py", address, TOPIC, *numbers]
    common = [
        "--warehouse",
        str(place / "warehouse"),
        "--bootstrap-servers",
        address,
        "--once",
        "--skip-check",
    ]
    common += ["--conf", "spark.sql.shuffle.partitions=2"]
    yield [*command, "pipeline", "archive", TOPIC, *common]
    for name, options in (("appended", APPEND_OPTIONS), ("upserted", UPSERT_OPTIONS)):
        checkpoint = ["--topic", TOPIC, "--checkpoint", str(place / "checkpoints" / name)]
        yield [*command, "pipeline", "run", f"{name}.py", *checkpoint, *options, *common]


def unpack(archive: Path, place: Path) -> None:
    """Put a lake into an empty directory: `data`, `warehouse` and `checkpoints`."""
    with tarfile.open(archive) as packed:
        for member in packed:
            content = packed.extractfile(member)
            assert content is not None, "there are files only"
            (place / member.name).parent.mkdir(parents=True, exist_ok=True)
            (place / member.name).write_bytes(content.read())
    made_in = (place / PLACE_FILE).read_text()
    warehouse = place / "warehouse"

    def moved(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(made_in, str(place))
        if isinstance(value, dict):
            return {name: moved(one) for name, one in value.items()}
        return [moved(one) for one in value] if isinstance(value, list) else value

    for path in warehouse.rglob("*.metadata.json"):
        path.write_text(json.dumps(moved(json.loads(path.read_text()))))
    for path in warehouse.rglob("*.avro"):
        with path.open("rb") as source:
            reader = fastavro.reader(source)
            entries, schema, codec = [moved(one) for one in reader], reader.writer_schema, reader.codec
            metadata = {name: text for name, text in reader.metadata.items() if not name.startswith("avro.")}
        with path.open("wb") as target:
            fastavro.writer(target, schema, entries, codec=codec, metadata=metadata)
    with sqlite3.connect(warehouse / "catalog.db") as catalog:
        for column in ("metadata_location", "previous_metadata_location"):
            catalog.execute(
                f"UPDATE iceberg_tables SET {column} = replace({column}, ?, ?)", (made_in, str(place))
            )
    catalog.close()


if __name__ == "__main__":
    made_by = Path(sys.argv[1]).resolve()
    LAKES.mkdir(exist_ok=True)
    make(made_by, LAKES / f"mansio-{made_by.name.split('-')[1]}.tar.gz")
