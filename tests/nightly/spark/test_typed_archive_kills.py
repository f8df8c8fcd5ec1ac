"""An archive with decoded values, killed at random while every round of records has a schema of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from mansio.iceberg.archive.table import open_table
from mansio.pipelines.archive import ArchiveJob, archive
from mansio.schemas.avro import AvroSchema
from mansio.serde.frames import schema_key_bytes
from nightly.spark.test_kills import NIGHTLY_KILLS, NIGHTLY_TIMEOUT_S, kill_at_random
from support.iceberg import checksum
from support.schema_registry import RegistryServer
from system.spark.test_kills import Archive
from system.spark.topics import contents, publish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from support.process import ServedBroker

WIDENED_FROM = 3
"""Version of the schema whose numbers are of 64 bits, and before which they are of 32."""


def schema(version: int) -> dict[str, Any]:
    """Each version adds a field; one changes a type."""
    number = "int" if version < WIDENED_FROM else "long"
    fields = [{"name": "number", "type": number}]
    fields += [{"name": f"field_{one}", "type": "string"} for one in range(version)]
    return {"type": "record", "name": "Row", "fields": fields}


class TypedArchive(Archive):
    """Its records are in Avro, with a new version of the schema at every `publish`."""

    def __init__(self, broker: ServedBroker, topic: str, place: Path, registry: RegistryServer) -> None:
        super().__init__(broker, topic, place)
        self.registry = registry
        self.version = 0
        self.rows: dict[bytes, dict[str, Any]] = {}
        """What the records say, by their values."""

    @property
    def decode(self) -> dict[str, str]:
        return {"valueFormat": "avro", "schemaRegistry": self.registry.url}

    def publish(self, count: int) -> None:
        made = schema(self.version)
        header = schema_key_bytes(self.registry.register(f"{self.source}-value", made))
        encode = AvroSchema(json.dumps(made)).encode
        records: list[tuple[bytes, bytes]] = []
        for number in range(self.published, self.published + count):
            row: dict[str, Any] = {"number": number if self.version < WIDENED_FROM else number + (1 << 40)}
            row |= {f"field_{one}": f"{one} of {number}" for one in range(self.version)}
            value = header + encode(row)
            self.rows[value] = row
            records.append((b"%d" % (number % 50), value))
        publish(self.broker.bootstrap_servers, self.source, records)
        self.published += count
        self.version += 1

    def words(self) -> list[str]:
        return [*super().words(), "--value-format", "avro", "--schema-registry", self.registry.url]

    def finish(self, spark: SparkSession) -> None:
        """The last start goes to the end; then each record is there exactly once, as its schema states."""
        before = self.done()
        job = ArchiveJob(
            self.source,
            str(self.warehouse),
            self.broker.bootstrap_servers,
            f"archive-{self.source}",
            stops_when_caught_up=True,
            decode=self.decode,
        )
        assert archive(spark, job).records == self.published - before
        log = contents(self.broker.bootstrap_servers, self.source)
        rows = self.table_rows()
        found = [(one["__partition"], one["__offset"], one["key"], one["value"]) for one in rows]
        assert checksum(found) == checksum([(one.partition, one.offset, one.key, one.value) for one in log])
        names = ["number", *(f"field_{one}" for one in range(self.version - 1))]
        expected = [{name: self.rows[one.value or b""].get(name) for name in names} for one in log]
        assert [one["decoded_value"] for one in rows] == expected
        assert self.published == len(expected)

    def table_rows(self) -> list[dict[str, Any]]:
        """The rows of the table, by partition and offset."""
        rows = open_table(None, str(self.warehouse), self.source).iceberg.scan().to_arrow()
        places = [("__partition", "ascending"), ("__offset", "ascending")]
        return list(rows.sort_by(places).to_pylist())


@pytest.fixture
def job(
    broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> Iterator[TypedArchive]:
    with RegistryServer() as registry:
        made = TypedArchive(broker_process, topic_name("typed"), tmp_path / "archive", registry)
        yield made
        for process in made.started:
            process.kill()


@pytest.mark.timeout(NIGHTLY_TIMEOUT_S)
def test_archive_of_decoded_values_killed_twenty_times_while_schemas_change_has_every_record_once(
    spark: SparkSession, job: TypedArchive
) -> None:
    kill_at_random(job)
    job.finish(spark)
    rows = checksum([list(row.items()) for row in job.table_rows()])
    print(f"{NIGHTLY_KILLS} kills, {job.published} records, {job.version} schemas, {rows}")
