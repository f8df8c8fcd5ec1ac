"""Archives and result tables that a release has written are read, continued and maintained by this source. No JVM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from mansio.errors import ConfigError
from mansio.iceberg.archive.table_scan import scan
from mansio.iceberg.errors import StaleCheckpoint
from mansio.iceberg.result_table.commit import QueryBatch, last_batches
from mansio.iceberg.result_table.table import TableTarget, check_target, open_existing_table
from mansio.pipelines.maintain import maintain
from mansio.pipelines.table_maintenance import maintain_table
from support.archive_tables import rows_of
from support.iceberg import plan, write_parts
from support.released_lakes import (
    BATCH_RECORDS,
    BATCHES,
    LAKES,
    appended_rows,
    archive_of,
    archived,
    read_result,
    records,
    unpack,
    upserted_rows,
)
from support.result_tables import append

if TYPE_CHECKING:
    from pathlib import Path

COUNT = BATCHES * BATCH_RECORDS
ENDS = {0: COUNT // 2, 1: COUNT // 2}


@pytest.fixture(params=sorted(LAKES.glob("*.tar.gz")), ids=lambda path: path.name.removesuffix(".tar.gz"))
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Its warehouse, at a place of another name than where it was made."""
    unpack(request.param, tmp_path / "elsewhere")
    return tmp_path / "elsewhere" / "warehouse"


def test_archive_of_a_release_is_read_continued_and_maintained(lake: Path) -> None:
    table = archive_of(lake)
    assert archived(table) == records(COUNT)
    last = table.last_commit()
    assert last is not None
    assert last.offsets == ENDS
    assert len(table.offset_history()) >= 1
    assert table.lost_ranges() == ()
    more = plan(last.batch + 1, ENDS, {0: ENDS[0] + 5, 1: ENDS[1]}, query=last.query)
    assert table.commit(more, write_parts(table, more)).added
    assert not archive_of(lake).commit(more, write_parts(table, more)).added, "it is there already"
    done = maintain(archive_of(lake), snapshots_kept=1, grace_s=0, tag="kept")
    assert (done.files, done.rows) == (2, COUNT + 5)
    again = archive_of(lake)
    assert archived(again, ENDS[0]) == records(COUNT)
    assert [row["value"] for row in rows_of(scan(again)) if row["__offset"] >= ENDS[0]] == [
        b"0:%d" % offset for offset in range(ENDS[0], ENDS[0] + 5)
    ]


def test_result_tables_of_a_release_are_read_continued_and_maintained(lake: Path) -> None:
    appended, upserted = (open_existing_table(name, str(lake), {}) for name in ("ns.appended", "ns.upserted"))
    assert read_result(lake, "ns.appended", "number") == appended_rows(COUNT)
    assert read_result(lake, "ns.upserted", "key") == upserted_rows(COUNT)
    assert upserted.key == ("key",)
    assert list(map(str, appended.partition_by)) == ["day(at)", "bucket(2, key)"]
    for table in (appended, upserted):
        ((query, (batch, _, digest)),) = last_batches(table.iceberg.properties).items()
        assert table.is_committed(QueryBatch(query, batch, digest or "what the checkpoint has planned"))
        with pytest.raises(StaleCheckpoint):
            table.is_committed(QueryBatch(query, batch - 1, digest))
    with pytest.raises(ConfigError, match="has the key key"):
        check_target(upserted, TableTarget("ns.upserted"))
    ((query, (batch, _, _)),) = last_batches(appended.iceberg.properties).items()
    new = pa.RecordBatch.from_pylist(appended_rows(COUNT + 3)[COUNT:], appended.layout().schema)
    assert append(appended, QueryBatch(query, batch + 1), new)
    assert not append(open_existing_table("ns.appended", str(lake), {}), QueryBatch(query, batch + 1), new)
    for table in (appended, upserted):
        maintain_table(table, grace_s=0)
    assert read_result(lake, "ns.appended", "number") == appended_rows(COUNT + 3)
    assert read_result(lake, "ns.upserted", "key") == upserted_rows(COUNT)
