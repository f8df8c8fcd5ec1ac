"""Backoff, promises, Scheduler.sleep on virtual time, and the atomic replacement of files."""

from __future__ import annotations

import errno
from random import Random

import pytest

from mansio.host.atomic_file import TEMPORARY_SUFFIX, write_file_atomically
from mansio.ports import Backoff, Promise, complete, complete_with_error
from mansio.testing.disk import SimulatedDisk
from mansio.testing.scheduler import Simulation
from support.tiers import examples
from unit.broker.groups_fixtures import VirtualScheduler


def test_backoff_doubles_up_to_the_longest_delay() -> None:
    backoff = Backoff(first_ms=50, longest_ms=1000, jitter=0)
    assert [backoff.delay_ms(failures) for failures in range(1, 8)] == [50, 100, 200, 400, 800, 1000, 1000]
    assert backoff.delay_ms(10_000) == 1000
    assert backoff.delay_seconds(1) == 0.05


def test_backoff_varies_by_its_jitter_and_is_deterministic_with_a_given_source() -> None:
    def delays() -> list[float]:
        backoff = Backoff(first_ms=100, longest_ms=100, jitter=0.2, uniform=Random(7).uniform)
        return [backoff.delay_ms(1) for _ in range(200)]

    assert delays() == delays()
    assert len(set(delays())) > 100
    assert all(80 <= delay <= 120 for delay in delays())


def test_backoff_without_jitter_draws_no_random_number() -> None:
    def uniform(low: float, high: float) -> float:
        raise AssertionError

    assert Backoff(first_ms=1, jitter=0, uniform=uniform).delay_ms(1) == 1


def test_sleep_takes_virtual_time_and_ends_with_the_task() -> None:
    simulation = Simulation()
    scheduler = simulation.scheduler()
    woken = []

    async def work() -> None:
        await scheduler.sleep(250)
        woken.append(simulation.now_ms)

    simulation.run(work())
    assert woken == [250]
    task = scheduler.spawn(work(), name="cancelled")
    simulation.run_for(1)
    task.cancel()
    simulation.run_for(1000)
    assert (woken, task.done) == ([250], True)


@pytest.mark.parametrize("seed", range(examples(8, 20)))
def test_file_has_its_old_or_its_new_content_after_any_crash(seed: int) -> None:
    disk = SimulatedDisk()
    disk.make_directory("/d")
    write_file_atomically(disk, "/d/f", b"old")
    images: list[SimulatedDisk] = []
    disk.on_change = lambda: images.append(disk.crash(Random(seed)))
    write_file_atomically(disk, "/d/f", b"new" * 1000)
    assert {image.read_file("/d/f") for image in images} <= {b"old", b"new" * 1000}
    assert disk.crash(Random(seed)).read_file("/d/f") == b"new" * 1000
    assert not disk.exists(f"/d/f{TEMPORARY_SUFFIX}")


def test_failed_write_keeps_the_old_content() -> None:
    disk = SimulatedDisk()
    disk.make_directory("/d")
    write_file_atomically(disk, "/d/f", b"old")
    disk.fail_when = lambda operation, path: errno.ENOSPC if operation == "write" else None
    with pytest.raises(OSError, match="No space"):
        write_file_atomically(disk, "/d/f", b"new")
    assert disk.read_file("/d/f") == b"old"


def test_first_outcome_of_a_promise_stays() -> None:
    scheduler = VirtualScheduler()
    succeeded: Promise[int] = scheduler.promise()
    complete(succeeded, 1)
    complete(succeeded, 2)
    complete_with_error(succeeded, ValueError("late"))
    assert succeeded.result() == 1
    failed: Promise[int] = scheduler.promise()
    complete_with_error(failed, ValueError("first"))
    complete(failed, 1)
    with pytest.raises(ValueError, match="first"):
        failed.result()
