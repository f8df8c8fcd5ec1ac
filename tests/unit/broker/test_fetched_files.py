"""A response to a fetch opens a bounded number of files, and readers get the records of all partitions nevertheless."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import pytest

from mansio.broker.services.fetch import FetchService
from mansio.host.disk import HostDisk
from mansio.state.broker_handshake import BrokerIdentity
from mansio.storage.file_cache import FileCache
from mansio.storage.log import Log
from support.logs import BenchScheduler, ManualClock, append, make_batch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PARTITIONS = 10
FILES_MAX = 3
FOLLOWER = BrokerIdentity(2, 7)


class CountingDisk(HostDisk):
    """A disk that knows the files that are open for reading only."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = WeakSet[Any]()

    def open_readonly(self, path: str) -> Any:
        file = super().open_readonly(path)
        self.opened.add(file)
        return file


class FakePartition(SimpleNamespace):
    """A partition that can be the key of a dict."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class FewFiles:
    """The fetch service over logs with one batch each."""

    def __init__(self, directory: Path) -> None:

        self.reads = 0
        self.scheduler = BenchScheduler()
        self.disk = CountingDisk()
        self.files = FileCache(self.disk, files_max=4)
        self.partitions: list[Any] = []
        for number in range(PARTITIONS):
            log = Log.open(self.disk, ManualClock(), str(directory / str(number)), files=self.files)
            append(log, make_batch([1]))
            log.sync()
            self.partitions.append(self._partition(log))
        self.service = FetchService(
            SimpleNamespace(find=lambda _, __, index: self.partitions[index]),  # type: ignore[arg-type]
            produce=SimpleNamespace(pending={}),  # type: ignore[arg-type]
            quotas=SimpleNamespace(active=None),  # type: ignore[arg-type]
            clock=ManualClock(),
            scheduler=self.scheduler,  # type: ignore[arg-type]
            response_bytes_max=1 << 20,
            wait_ms_max=500,
            authenticator=SimpleNamespace(is_current_session=lambda _: True),  # type: ignore[arg-type]
            files=self.files,
        )

    def _partition(self, log: Log) -> Any:
        def read(offset: int, max_bytes: int, _: int) -> Any:
            self.reads += 1
            return log.read(offset, max_bytes, log.end_offset)

        def read_for_follower(_: int, __: int, wanted: Any, max_bytes: int, *, first: bool) -> Any:
            del first
            return read(wanted.fetch_offset, max_bytes, 0) if max_bytes > 0 else None, None, False

        return FakePartition(
            log=log,
            read=read,
            read_for_follower=read_for_follower,
            check_leader_epoch=lambda _: None,
            readable_end=lambda _: log.end_offset,
            replica=SimpleNamespace(high_watermark=log.end_offset),
            group_commit=None,
            park=lambda *_: None,
            waits=SimpleNamespace(
                park_follower=lambda _: None, unpark=lambda _: None, unpark_follower=lambda _: None
            ),
        )

    def close_segments(self) -> None:
        """Move the batches into closed segments, whose files the cache opens."""
        for partition in self.partitions:
            partition.log.roll()
            partition.log.sync()

    def request(self, indexes: Sequence[int], **options: Any) -> Any:
        """A fetch from offset 0."""
        wanted = [
            SimpleNamespace(index=index, fetch_offset=0, current_leader_epoch=-1, max_bytes=1 << 20)
            for index in indexes
        ]
        common = {
            "max_bytes": 1 << 20,
            "min_bytes": 1,
            "max_wait_ms": 500,
            "isolation_level": 0,
            "rack_id": "",
        }
        session = {"session_id": 0, "session_epoch": -1, "forgotten_topics": []}
        return SimpleNamespace(
            topics=[("t", None, wanted)], is_repair_read=False, **session, **{**common, **options}
        )

    def read(self, indexes: Sequence[int], *, by_follower: bool) -> list[Any]:
        """Results with records of a fetch from offset 0."""
        follower = FOLLOWER if by_follower else None
        result = self.service.read(self.request(indexes), "u", None, None, follower)
        ((_, _, found),) = result.topics
        assert all(each.error is None for each in found)
        return [each for each in found if each.records is not None]

    def fetched(self, offsets: Sequence[tuple[int, int]], *, by_follower: bool) -> list[int]:
        """Fetch from (partition, offset); return the partitions with records."""
        wanted = [
            SimpleNamespace(index=index, fetch_offset=offset, current_leader_epoch=-1, max_bytes=1 << 20)
            for index, offset in offsets
        ]
        request: Any = SimpleNamespace(
            topics=[("t", None, wanted)],
            max_bytes=1 << 20,
            isolation_level=0,
            rack_id="",
            is_repair_read=False,
        )
        result = self.service.read(request, "u", None, None, FOLLOWER if by_follower else None)
        ((_, _, found),) = result.topics
        assert len(found) == len(wanted)
        assert result.size_bytes == sum(each.size_bytes for each in found)
        assert all(each.error is None for each in found)
        return [each.partition for each in found if each.records is not None]


@pytest.mark.parametrize("by_follower", [False, True], ids=["client", "follower"])
def test_a_response_has_records_of_so_many_partitions_as_files_may_be_open_for_it(
    tmp_path: Path, by_follower: bool
) -> None:
    few = FewFiles(tmp_path)
    wanted = [(index, 0) for index in range(PARTITIONS)]
    assert few.fetched(wanted, by_follower=by_follower) == [0, 1, 2]
    assert few.reads == FILES_MAX
    empty = [(index, 1 if index < 8 else 0) for index in range(PARTITIONS)]
    assert few.fetched(empty, by_follower=by_follower) == [8, 9], "partitions without records count as files"
    seen: list[int] = []
    while wanted:  # a reader asks first for those that it got nothing of
        got = few.fetched(wanted, by_follower=by_follower)
        seen += got
        wanted = [each for each in wanted if each[0] not in got]
    assert seen == list(range(PARTITIONS))


@pytest.mark.parametrize("by_follower", [False, True], ids=["client", "follower"])
def test_a_response_with_as_many_files_as_it_may_have_is_not_held_back_for_more_bytes(
    tmp_path: Path, by_follower: bool
) -> None:
    """The other partitions have more, so that the wait would last for the whole of max_wait_ms."""
    few = FewFiles(tmp_path)
    follower = FOLLOWER if by_follower else None
    one = few.partitions[0].log.size_bytes
    request = few.request(range(PARTITIONS), min_bytes=5 * one)
    result, is_final = few.service.begin_fetch(request, "u", None, None, follower)
    assert is_final
    assert result.size_bytes == FILES_MAX * one
    request = few.request(range(2), min_bytes=5 * one)
    result, is_final = few.service.begin_fetch(request, "u", None, None, follower)
    assert not is_final, "two files and too few bytes"
    done: list[Any] = []
    parked = few.service.park(request, "u", None, None, result, done.append, follower)
    few.scheduler.run()
    assert not done
    request.topics = few.request(range(PARTITIONS)).topics
    parked.wake()
    few.scheduler.run()
    assert [each.size_bytes for each in done] == [FILES_MAX * one]


@pytest.mark.parametrize("by_follower", [False, True], ids=["client", "follower"])
def test_responses_that_are_not_sent_yet_keep_a_bounded_number_of_files_open_in_all(
    tmp_path: Path, by_follower: bool
) -> None:
    """Readers that take no bytes from their connections must not take all descriptors, nor what others read."""
    few = FewFiles(tmp_path)
    few.close_segments()
    batches = [bytes(partition.log.read(0, 1000, 1).read()) for partition in few.partitions]
    unsent = []
    for _ in range(3):
        for first in range(PARTITIONS):
            indexes = [(first + each) % PARTITIONS for each in range(PARTITIONS)]
            found = few.read(indexes, by_follower=by_follower)
            assert found[0].partition == first
            for each in found:
                records = each.records if isinstance(each.records, bytes) else each.records.read()
                assert records == batches[each.partition]
            unsent.append(found)
            assert len(few.disk.opened) <= 4
    assert any(isinstance(each.records, bytes) for found in unsent for each in found)
    unsent.clear()
    del found, each
    assert not few.files.sent_files
    few.read(range(PARTITIONS), by_follower=by_follower)
    assert not any(
        isinstance(each.records, bytes) for each in few.read([7, 8, 9], by_follower=by_follower)
    ), "nothing is limited any more"
