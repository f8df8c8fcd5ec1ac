"""A table that is not ours is refused, a catalog that cannot be used is named with what to do."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from pyiceberg.catalog.sql import SqlCatalog

from mansio.errors import ConfigError
from mansio.iceberg import catalog as catalogs
from mansio.iceberg.archive.table import ICEBERG_SCHEMA, open_table
from mansio.iceberg.archive.table_format import TABLE_SCHEMA
from mansio.iceberg.errors import CatalogLocked, CatalogUnavailable, NotAnArchiveTable, TableNotFound
from mansio.iceberg.orphan_cleanup import remove_orphan_files
from support.iceberg import add, expected, held, plan


def test_table_is_found_again_with_topic_id_and_place(tmp_path: Path) -> None:
    made = open_table(None, str(tmp_path), "flights.of-2013_x", create=True, topic_id="abc")
    found = open_table(None, str(tmp_path), "flights.of-2013_x", topic_id="abc")
    assert (found.topic, found.topic_id, found.data_location) == (made.topic, "abc", made.data_location)
    assert [field.name for field in ICEBERG_SCHEMA.fields] == TABLE_SCHEMA.names
    assert (
        found.iceberg.schema().as_arrow().field("__timestamp").type == TABLE_SCHEMA.field("__timestamp").type
    )


def test_topics_whose_names_differ_in_a_dot_have_tables_of_their_own(tmp_path: Path) -> None:
    for topic in ("a.b", "a_b", "b"):
        add(open_table(None, str(tmp_path), topic, create=True), plan(0, {0: 0}, {0: len(topic)}))
    for topic in ("a.b", "a_b", "b"):
        assert held(open_table(None, str(tmp_path), topic)) == expected({0: len(topic)})


def test_looking_for_an_archive_makes_nothing(tmp_path: Path) -> None:
    warehouse = tmp_path / "none"
    with pytest.raises(TableNotFound, match="mansio pipeline archive t"):
        open_table(None, str(warehouse), "t")
    assert not warehouse.exists()


def test_copy_of_a_warehouse_is_refused_because_its_files_are_those_of_the_original(tmp_path: Path) -> None:
    """Else its maintenance deleted what the original has archived since: the copy's catalog does not refer to it."""
    lake, copy = tmp_path / "lake", tmp_path / "copy"
    table = open_table(None, str(lake), "t", create=True)
    add(table, plan(0, {0: 0}, {0: 5}))
    shutil.copytree(lake, copy)
    add(table, plan(1, {0: 5}, {0: 8}))
    with pytest.raises(NotAnArchiveTable, match=f"has its files in {lake}"):
        remove_orphan_files(open_table(None, str(copy), "t"), snapshots_kept=10, grace_s=0)
    assert held(open_table(None, str(lake), "t")) == expected({0: 8})
    (tmp_path / "link").symlink_to(lake)
    assert held(open_table(None, str(tmp_path / "link"), "t")) == expected({0: 8})


@pytest.mark.parametrize("name", ["lake#1", "lake?1", "a%2Fb"])
def test_warehouse_whose_name_would_be_read_as_another_is_refused(tmp_path: Path, name: str) -> None:
    """Else lake#1 and lake#2 had one catalog, and the one topic's archive were the other's."""
    with pytest.raises(ConfigError, match="choose another directory"):
        open_table(None, str(tmp_path / name), "t", create=True)
    assert list(tmp_path.iterdir()) == []


def test_warehouse_elsewhere_needs_a_catalog(tmp_path: Path) -> None:
    with pytest.raises(CatalogUnavailable, match="name a catalog"):
        open_table(None, "s3://bucket/warehouse", "t", create=True)


def test_table_of_another_program_is_refused(tmp_path: Path) -> None:
    uri, location = f"sqlite:///{tmp_path}/catalog.db", f"file://{tmp_path}"
    theirs = SqlCatalog("mansio", uri=uri, warehouse=location)
    theirs.create_namespace("mansio")
    theirs.create_table("mansio.t", TABLE_SCHEMA)
    theirs.engine.dispose()
    with pytest.raises(NotAnArchiveTable, match="was not made by"):
        open_table(uri, str(tmp_path), "t", create=True)


def test_topic_that_was_deleted_and_made_again_is_refused(tmp_path: Path) -> None:
    open_table(None, str(tmp_path), "t", create=True, topic_id="old")
    with pytest.raises(NotAnArchiveTable, match=r"earlier topic t \(id old\).*again \(id new\)"):
        open_table(None, str(tmp_path), "t", create=True, topic_id="new")


def test_table_that_would_commit_twice_is_refused(tmp_path: Path) -> None:
    table = open_table(None, str(tmp_path), "t", create=True)
    with table.transaction() as change:
        change.set_properties({"commit.retry.num-retries": "4"})
    with pytest.raises(NotAnArchiveTable, match="added twice"):
        open_table(None, str(tmp_path), "t")


def test_locked_catalog_is_named_and_the_batch_gets_in_once_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogs, "CATALOG_LOCK_TIMEOUT_S", 0.1)
    table = open_table(None, str(tmp_path), "t", create=True)
    lock = sqlite3.connect(tmp_path / "catalog.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    with pytest.raises(CatalogLocked, match=f"{tmp_path}/catalog.db is locked by another program"):
        add(table, plan(0, {0: 0}, {0: 5}))
    with pytest.raises(CatalogLocked):
        open_table(None, str(tmp_path), "t")
    lock.execute("ROLLBACK")
    lock.close()
    assert add(table, plan(0, {0: 0}, {0: 5}))
    assert held(table) == expected({0: 5})


def test_unreachable_catalog_is_one_line_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(CatalogUnavailable) as raised:
        open_table("http://user:secret@127.0.0.1:9/catalog", str(tmp_path), "t", create=True)
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_all_a_commit_refers_to_is_on_the_disk_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data, manifests, their list and the metadata file, and the names of them all."""
    table = open_table(None, str(tmp_path), "t", create=True)
    synced: set[str] = set()
    sync, commit_table = os.fsync, table.iceberg.catalog.commit_table
    new: set[str] = set()

    def note(descriptor: int) -> None:
        sync(descriptor)
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    def files() -> set[str]:
        return {str(path) for path in tmp_path.rglob("*") if path.is_file() and "catalog.db" not in path.name}

    def committed(*given: object) -> object:
        answer = commit_table(*given)  # type: ignore[arg-type]
        new.update(files() - before)
        return answer

    before = files()
    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(table.iceberg.catalog, "commit_table", committed)
    assert add(table, plan(0, {0: 0}, {0: 5}))
    assert len(new) == 4
    assert new <= synced
    assert {str(Path(path).parent) for path in new} <= synced
