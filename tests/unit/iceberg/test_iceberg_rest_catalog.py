"""An archive whose catalog is a REST catalog: pyiceberg's own client, over HTTP, with answers that get lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mansio.iceberg.archive.table import ArchiveTable, open_table
from mansio.iceberg.errors import CatalogUnavailable, ConcurrentArchive, TableNotFound
from mansio.pipelines.compact import open_target_table, replace_rows
from mansio.pipelines.maintain import maintain
from support.iceberg import add, expected, held, plan
from support.rest_catalog import RestCatalog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[RestCatalog]:
    with RestCatalog(tmp_path / "rest") as catalog:
        yield catalog


def opened(rest: RestCatalog, tmp_path: Path) -> ArchiveTable:
    return open_table(rest.address, str(tmp_path / "lake"), "t", create=True)


@pytest.mark.parametrize("lost", [None, "before", "after"])
def test_each_batch_is_in_the_table_once_also_when_the_answer_to_its_commit_is_lost(
    rest: RestCatalog, tmp_path: Path, lost: str | None
) -> None:
    with pytest.raises(TableNotFound):
        open_table(rest.address, str(tmp_path / "lake"), "t")
    table = opened(rest, tmp_path)
    assert add(table, plan(0, {0: 0, 1: 0}, {0: 5, 1: 3}))
    rest.fail_next = lost
    second = plan(1, {0: 5, 1: 3}, {0: 9, 1: 4})
    add(table, second)
    assert not add(opened(rest, tmp_path), second), "it is there already"
    assert held(opened(rest, tmp_path)) == expected({0: 9, 1: 4})


def test_two_archives_do_not_both_add(rest: RestCatalog, tmp_path: Path) -> None:
    one, two = opened(rest, tmp_path), opened(rest, tmp_path)
    assert add(one, plan(0, {0: 0}, {0: 5}, query="one"))
    with pytest.raises(ConcurrentArchive):
        add(two, plan(0, {0: 0}, {0: 4}, query="two"))
    assert held(two) == expected({0: 5})


@pytest.mark.full
def test_maintenance_and_compaction_work_as_with_a_file(rest: RestCatalog, tmp_path: Path) -> None:
    table = opened(rest, tmp_path)
    for batch in range(4):
        add(table, plan(batch, {0: batch * 2}, {0: batch * 2 + 2}))
    assert maintain(table, snapshots_kept=1, grace_s=0, tag="kept").files == 1
    assert held(opened(rest, tmp_path)) == expected({0: 8})
    target = open_target_table(table, "latest")
    latest = ArchiveTable(target, "t", target.location())
    rest.fail_next = "after"
    replace_rows(latest, [], {0: 8})
    assert open_target_table(table, "latest").properties["mansio.compacted-offsets"] == '{"0":8}'


def test_catalog_that_is_gone_is_named_in_one_line(rest: RestCatalog, tmp_path: Path) -> None:
    table = opened(rest, tmp_path)
    with RestCatalog(tmp_path / "other") as other:
        address = other.address
    with pytest.raises(CatalogUnavailable, match="does not work") as caught:
        open_table(address, str(tmp_path / "lake"), "t")
    assert address in str(caught.value)
    table.refresh()
