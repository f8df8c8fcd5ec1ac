"""Archives in Iceberg's own REST catalog: made, continued, maintained and read as with a catalog in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mansio.iceberg.archive.table import ArchiveTable, open_table
from mansio.iceberg.errors import CatalogUnavailable, ConcurrentArchive, TableNotFound
from mansio.pipelines.maintain import maintain
from support.iceberg import add, expected, held, plan
from support.iceberg_server import IcebergServer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.full


def test_each_batch_is_in_an_archive_once_across_conflicts_maintenance_and_a_restart_of_the_catalog(
    tmp_path: Path,
) -> None:
    def opened(*, create: bool = False) -> ArchiveTable:
        return open_table(server.address, str(tmp_path / "lake"), "t", create=create)

    with IcebergServer(tmp_path / "server") as server:
        with pytest.raises(TableNotFound):
            opened()
        table, late = opened(create=True), opened()
        assert add(table, plan(0, {0: 0, 1: 0}, {0: 5, 1: 3}))
        with pytest.raises(ConcurrentArchive):
            add(late, plan(0, {0: 0}, {0: 4}, query="another"))
        second = plan(1, {0: 5, 1: 3}, {0: 9, 1: 4})
        assert add(table, second)
        assert not add(opened(), second), "it is there already"
        server.kill()
        with pytest.raises(CatalogUnavailable):
            table.refresh()
        server.start()
        assert maintain(opened(), snapshots_kept=1, grace_s=0, tag="kept").rows == 13
        assert not add(opened(), second)
        assert add(opened(), plan(2, {0: 9, 1: 4}, {0: 12, 1: 4}))
        assert held(opened()) == expected({0: 12, 1: 4})
