"""The host's disk and the simulated disk have the same semantics; the worker thread keeps the order of jobs."""

from __future__ import annotations

import errno
import os
import queue
import random
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from mansio.errors import DataDirectoryLocked
from mansio.host.clock import HostClock, HostRandom
from mansio.host.disk import HostDisk
from mansio.host.threads import BackgroundThread
from mansio.testing.disk import SimulatedDisk

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.ports import Disk


@pytest.fixture(params=["host", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Disk, str]:
    """A disk and a directory on it."""
    if request.param == "host":
        return HostDisk(), str(tmp_path)
    disk = SimulatedDisk()
    disk.make_directory("/data")
    return disk, "/data"


def test_files(place: tuple[Disk, str]) -> None:
    disk, root = place
    with pytest.raises(FileNotFoundError):
        disk.open(f"{root}/a")
    file = disk.open(f"{root}/a", create=True)
    assert file.write_at([b"hello ", bytearray(b"big "), memoryview(b"world")], 2) == 15
    assert file.size() == 17
    assert file.read_at(100, 0) == b"\0\0hello big world"
    assert file.read_at(5, 2) == b"hello"
    assert file.read_at(5, 17) == b""
    assert file.write_at([b"x"] * 3000, 0) == 3000  # more buffers than one system call takes
    view = file.map(4)
    file.truncate(10)
    file.sync()
    file.close()
    assert bytes(view) == b"xxxx"
    assert disk.read_file(f"{root}/a") == b"x" * 10
    with pytest.raises(OSError, match="descriptor"):
        disk.open_readonly(f"{root}/a").write_at([b"x"], 0)


def test_names(place: tuple[Disk, str]) -> None:
    disk, root = place
    disk.make_directory(f"{root}/b/c")
    disk.make_directory(f"{root}/b/c")
    disk.open(f"{root}/b/one", create=True)
    disk.open(f"{root}/b/two", create=True).write_at([b"2"], 0)
    disk.rename(f"{root}/b/two", f"{root}/b/one")
    assert disk.list_directory(f"{root}/b") == ["c", "one"]
    assert disk.read_file(f"{root}/b/one") == b"2"
    disk.sync_directory(f"{root}/b")
    assert disk.sync_all(root) in (True, False)
    assert disk.free_bytes(root) > 0
    disk.remove(f"{root}/b/one")
    with pytest.raises(FileNotFoundError):
        disk.remove(f"{root}/b/one")
    disk.remove_tree(f"{root}/b")
    assert not disk.exists(f"{root}/b")
    assert not disk.exists(f"{root}/b/c")


def test_lock(place: tuple[Disk, str]) -> None:
    disk, root = place
    lock = disk.lock(f"{root}/lock")
    with pytest.raises(DataDirectoryLocked):
        disk.lock(f"{root}/lock")
    lock.release()
    disk.lock(f"{root}/lock").release()


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = HostDisk().open(str(tmp_path / "a"), create=True)
    real = os.pwrite

    def short(descriptor: int, buffers: list[bytes], position: int) -> int:
        return real(descriptor, b"".join(buffers)[:3], position)

    monkeypatch.setattr(os, "pwritev", short)
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, position: real(descriptor, data[:2], position))
    assert file.write_at([b"abc", b"defgh"], 1) == 8
    assert file.read_at(100, 0) == b"\0abcdefgh"


def test_dropped_file_closes_its_descriptor(tmp_path: Path) -> None:
    file = HostDisk().open(str(tmp_path / "a"), create=True)
    descriptor = file.fileno()
    os.fstat(descriptor)
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_clock_and_random() -> None:
    clock = HostClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.wall_ms() > 1_600_000_000_000
    assert len(HostRandom().bytes(7)) == 7
    assert 1 <= HostRandom().uniform(1, 2) <= 2


def test_worker_runs_jobs_in_order_and_returns_errors() -> None:
    loop: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    worker = BackgroundThread(lambda callback, *arguments: loop.put((callback, arguments)))
    threads: list[int] = []
    results: list[tuple[Any, Any]] = []

    def job(value: int) -> int:
        threads.append(threading.get_ident())
        return 10 // value

    for value in (1, 0, 5):
        worker.submit(partial(job, value), lambda result, error: results.append((result, type(error))))
    worker.close()
    while not loop.empty():
        callback, arguments = loop.get()
        callback(*arguments)
    assert [result for result, _ in results] == [10, None, 2]
    assert results[1][1] is ZeroDivisionError
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
    with pytest.raises(RuntimeError):
        worker.submit(lambda: None, lambda result, error: None)
    worker.close()


def test_crash_keeps_synced_changes_and_any_subset_of_the_others() -> None:
    disk = SimulatedDisk()
    disk.make_directory("/d")
    file = disk.open("/d/a", create=True)
    file.write_at([b"A" * 1024], 0)
    file.sync()
    disk.sync_directory("/d")
    file.write_at([b"B" * 1024], 1024)
    file.write_at([b"C" * 1024], 2048)
    disk.open("/d/new", create=True).sync()
    seen = {
        (image["/d/a"], "/d/new" in image)
        for image in (disk.crash(random.Random(n)).files() for n in range(300))
    }
    contents = {data for data, _ in seen}
    assert all(data.startswith(b"A" * 1024) for data in contents)
    assert b"A" * 1024 in contents
    assert b"A" * 1024 + b"B" * 1024 + b"C" * 1024 in contents
    assert b"A" * 1024 + bytes(1024) + b"C" * 1024 in contents  # the later write without the earlier one
    assert any(b"B" * 512 in data and b"B" * 513 not in data for data in contents)  # a torn write
    assert {there for _, there in seen} == {True, False}


def test_changes_of_a_failed_sync_never_become_durable() -> None:
    disk = SimulatedDisk()
    disk.make_directory("/d")
    file = disk.open("/d/a", create=True)
    disk.sync_directory("/d")
    file.write_at([b"A"], 0)
    disk.fail_call(disk.calls + 1)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        file.sync()
    file.sync()
    assert file.read_at(1, 0) == b"A"
    assert b"" in {disk.crash(random.Random(n)).files()["/d/a"] for n in range(30)}
