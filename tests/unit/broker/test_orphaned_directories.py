"""Orphaned directories: removed only under the same metadata under which they were created."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import pytest

from mansio.broker.maintenance.orphaned_directories import OrphanedDirectories
from mansio.broker.partition.partition_files import topic_directory
from mansio.errors import StorageError
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.disk import HostDisk
from mansio.metadata.image import MetadataImage
from mansio.metadata.metadata_store import Entry, Keys, MetadataStore
from mansio.metadata.model import TOPIC_CREATING, TOPIC_LIVE, PartitionState, Topic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class AtOnce:
    """A thread that has done it already."""

    def submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # as a thread hands it over
            done(None, error)
        else:
            done(result, None)

    def close(self) -> None: ...


class Metadata:
    """What etcd has: the `format` key, a revision, topics."""

    def __init__(self, token: str = "first", revision: int = 100) -> None:
        self.format: bytes | None = f'{{"writer":"{token}"}}'.encode()
        self.state = MetadataImage("c" * 22, Keys("c" * 22), revision=revision)

    def have(
        self, number: int, state: str = TOPIC_LIVE, partitions: tuple[PartitionState, ...] = ()
    ) -> Topic:
        topic = Topic(f"t{number}", UUID(int=number), partitions, 1, {}, False, state, 1)
        where = self.state.topics if state == TOPIC_LIVE else self.state.unfinished_topics
        where[topic.name] = topic
        return topic

    async def get(self, key: str) -> Entry | None:
        assert key == self.state.keys.format
        return None if self.format is None else Entry(key, self.format, 1, 1)


class DataDirectory:
    """A data directory, over several starts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "topics").mkdir()

    def make(self, topic: Topic) -> Path:
        directory = self.path / "topics" / topic_directory("", topic).rpartition("/")[2]
        (directory / "0").mkdir(parents=True)
        (directory / "0" / "00.log").write_bytes(b"records")
        return directory

    def start(self, metadata: Metadata, *, until: int | None = None, disk: Any = None) -> None:
        """One start; then a topic is made at revision `until`."""

        async def story() -> None:
            scheduler = AsyncioScheduler(asyncio.get_running_loop())
            orphaned_directories = OrphanedDirectories(
                disk or HostDisk(), AtOnce(), scheduler, str(self.path), 1
            )
            store = cast("MetadataStore", metadata)
            await orphaned_directories.move_orphaned_directories(store, metadata.state)
            await orphaned_directories.remove_moved()
            if until is not None:
                await orphaned_directories.record_revision(until)

        asyncio.run(story())

    def names(self, where: str) -> list[str]:
        root = self.path / where
        return sorted(one.name.partition(".")[0] for one in root.iterdir()) if root.exists() else []


@pytest.fixture
def data_directory(tmp_path: Path) -> DataDirectory:
    return DataDirectory(tmp_path)


def gone_topic() -> Topic:
    return Metadata().have(9)


def test_a_topic_that_is_no_more_is_removed_and_what_is_there_stays(data_directory: DataDirectory) -> None:
    before, now = Metadata(), Metadata(revision=150)
    data_directory.start(before, until=120)
    kept, half = now.have(1), now.have(2, TOPIC_CREATING)
    for topic in (kept, half, gone_topic()):
        data_directory.make(topic)
    (data_directory.path / "topics" / "notes.txt").mkdir()
    data_directory.start(now)
    assert data_directory.names("topics") == ["notes", "t1", "t2"]
    assert (data_directory.names("removed"), data_directory.names("quarantine")) == ([], [])


@pytest.mark.parametrize("doubt", ["made anew", "wiped", "older", "never noted", "note damaged"])
def test_where_the_metadata_may_be_others_directories_are_quarantined_and_stay_so(
    data_directory: DataDirectory, doubt: str, caplog: pytest.LogCaptureFixture
) -> None:
    if doubt != "never noted":
        data_directory.start(Metadata(), until=120)
    if doubt == "note damaged":
        (data_directory.path / "last-metadata-revision").write_bytes(b"x" * 40)
    now = Metadata(
        token="second" if doubt == "made anew" else "first", revision=119 if doubt == "older" else 150
    )
    if doubt == "wiped":
        now.format = None
    directory = data_directory.make(gone_topic())
    with caplog.at_level(logging.WARNING):
        data_directory.start(now)
    assert data_directory.names("topics") == data_directory.names("removed") == []
    aside = data_directory.path / "quarantine" / directory.name
    assert (aside / "0" / "00.log").read_bytes() == b"records"
    assert "unknown_directory_quarantined" in caplog.text
    now.state.revision += 1000
    data_directory.start(now)
    assert (aside / "0" / "00.log").exists(), "a later start knows no better"


def test_one_of_the_same_name_that_was_quarantined_before_is_not_replaced(
    data_directory: DataDirectory,
) -> None:
    for _ in range(2):
        data_directory.make(gone_topic())
        (data_directory.path / "last-metadata-revision").unlink(missing_ok=True)
        data_directory.start(Metadata())
    assert len(list((data_directory.path / "quarantine").iterdir())) == 2


def test_a_removal_that_was_broken_off_is_finished_by_the_next_start(data_directory: DataDirectory) -> None:
    data_directory.start(Metadata(), until=120)
    data_directory.make(gone_topic())

    class Dies(HostDisk):
        def remove_tree(self, path: str) -> None:
            raise OSError(5, "Input/output error", path)

    with pytest.raises(StorageError, match="Input/output error"):
        data_directory.start(Metadata(revision=150), disk=Dies())
    assert (data_directory.names("topics"), data_directory.names("removed")) == ([], ["t9"])
    data_directory.start(Metadata(revision=150))
    assert data_directory.names("removed") == []


def test_a_broker_starts_on_a_full_disk(
    data_directory: DataDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    data_directory.start(Metadata(), until=120)
    data_directory.make(gone_topic())

    class Full(HostDisk):
        def make_directory(self, path: str, *, durable: bool = True) -> None:
            raise OSError(28, "No space left on device", path)

    data_directory.start(Metadata(revision=150), disk=Full())
    assert data_directory.names("topics") == ["t9"]
    assert "orphaned_directory_scan_skipped" in caplog.text


@pytest.mark.parametrize("is_older", [False, True])
def test_a_replica_that_was_removed_while_the_broker_was_down_is_removed_or_quarantined(
    data_directory: DataDirectory, *, is_older: bool
) -> None:
    data_directory.start(Metadata(), until=120)
    now = Metadata(revision=119 if is_older else 150)
    states = (PartitionState((2, 3), 2, 4, (2,)), PartitionState((1, 2), 2, 4, (2,)))
    directory = data_directory.make(now.have(1, partitions=states))
    (directory / "1").mkdir()
    for name in ("0.damaged", "1.damaged"):
        (directory / name).mkdir()
    data_directory.start(now)
    assert {path.name for path in directory.iterdir()} == {"1", "1.damaged"}
    for name in ("0", "0.damaged"):
        quarantined = data_directory.path / "quarantine" / f"{directory.name}.{name}"
        assert quarantined.exists() == is_older
    assert data_directory.names("removed") == []


def test_a_replica_is_removed_with_its_quarantined_directory(data_directory: DataDirectory) -> None:
    topic = Metadata().have(1)
    directory = data_directory.make(topic)
    (directory / "0.damaged").mkdir()
    (directory / "1.damaged").mkdir()

    async def remove() -> None:
        scheduler = AsyncioScheduler(asyncio.get_running_loop())
        directories = OrphanedDirectories(HostDisk(), AtOnce(), scheduler, str(data_directory.path), 1)
        await directories.remove_replica(topic, 0)
        await directories.remove_replica(topic, 0)

    asyncio.run(remove())
    assert [path.name for path in directory.iterdir()] == ["1.damaged"]
    assert data_directory.names("removed") == []
