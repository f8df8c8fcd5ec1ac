"""The format of a data directory is raised before anything is stored that requires it, and a failure prevents that."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from mansio.broker.maintenance.data_dir_format import claim_data_dir_format, read_data_dir_format
from mansio.errors import StorageError
from mansio.metadata.metadata_store import Delete, Put, encode
from mansio.state.producers import ProducerTable, is_first_version
from mansio.storage.log import Log
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.record_batch import BatchHeader, build_batch, check_stored_batch, encode_batch
from support.logs import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable

CONTROL = encode_batch(BatchHeader(0, 0, 0, 2, 0, 0x20, 0, -1, -1, 7, 0, -1, 1), bytes(10))
TRANSACTIONAL = encode_batch(BatchHeader(0, 0, 0, 2, 0, 0x10, 0, -1, -1, 7, 0, 0, 1), bytes(10))
PLAIN = build_batch([(1, None, b"value", ())])


def open_log(disk: SimulatedDisk, before_newer_format: Callable[[], object]) -> Log:
    return Log.open(disk, ManualClock(), "data/t-0", before_newer_format=before_newer_format)


def add(log: Log, batch: bytes, *, as_follower: bool) -> None:
    header = check_stored_batch(batch)
    if as_follower:
        log.append_as_follower(memoryview(batch), [header], sparse_end_offset=0)
    else:
        log.append(batch, header, 0)


@pytest.mark.parametrize("as_follower", [False, True])
@pytest.mark.parametrize(("batch", "number"), [(CONTROL, 2), (TRANSACTIONAL, 2), (PLAIN, 1)])
def test_batches_that_the_first_release_does_not_accept_raise_the_format(
    batch: bytes, number: int, as_follower: bool
) -> None:
    disk = SimulatedDisk()
    disk.make_directory("data")
    log = open_log(disk, claim_data_dir_format(disk, "data").require_current)
    add(log, batch, as_follower=as_follower)
    assert read_data_dir_format(disk, "data") == number
    assert claim_data_dir_format(disk, "data") is not None


@pytest.mark.parametrize("as_follower", [False, True])
def test_batch_is_not_stored_while_the_format_cannot_be_raised(as_follower: bool) -> None:
    disk = SimulatedDisk()
    disk.make_directory("data")
    data_format = claim_data_dir_format(disk, "data")
    failures = [OSError(errno.ENOSPC, "no space")]

    def raise_format() -> None:
        if failures:
            raise failures.pop()
        data_format.require_current()

    log = open_log(disk, raise_format)
    with pytest.raises(StorageError):
        add(log, CONTROL, as_follower=as_follower)
    assert (log.end_offset, log.failure) == (0, None)
    add(log, CONTROL, as_follower=as_follower)
    assert log.end_offset == 1


@pytest.mark.parametrize(
    ("key", "configs", "number"),
    [
        ("topics/orders", {"retention.ms": "1", "mansio.hold.enable": "true"}, 1),
        ("topics/orders", {"mansio.queue.attributes": "{}"}, 2),
        ("topics/__consumer_offsets", {}, 1),
        ("topics/__transaction_state", {}, 2),
        ("brokerconfigs/default", {"mansio.dedup.ms": "5"}, 2),
        ("brokerconfigs/1", {"log.retention.ms": "5"}, 1),
        ("brokerconfigs/default", {"group.share.delivery.count.limit": "50"}, 2),
        ("groupconfigs/a%2Fb", {"mansio.share.order": "PARTITION", "share.delivery.count.limit": "10"}, 1),
        ("groupconfigs/a", {"mansio.share.order": "KEY"}, 2),
        ("groupconfigs/a", {"share.delivery.count.limit": "11"}, 2),
        ("parts/6e1f/0", {"mansio.dedup.ms": "5"}, 1),
    ],
)
def test_metadata_that_the_first_release_does_not_know_raises_the_format(
    key: str, configs: dict[str, str], number: int
) -> None:
    disk = SimulatedDisk()
    disk.make_directory("data")
    data_format = claim_data_dir_format(disk, "data")
    data_format.before_metadata_commit([Delete(f"/mansio/c/{key}"), Put("/mansio/first", b"c")])
    data_format.before_metadata_commit([Put(f"/mansio/c/{key}", encode({"configs": configs}, "w"))])
    assert read_data_dir_format(disk, "data") == number


def test_producers_without_transactions_are_saved_as_the_first_release_reads_them() -> None:
    table = ProducerTable()
    table.record(BatchHeader(0, 61, 0, 2, 0, 0, 2, 1000, 1000, 7, 3, 0, 3), 100, 5)
    first = table.to_bytes(103)
    assert is_first_version(first)
    assert ProducerTable.from_bytes(first)[0].to_bytes(103) == first
    table.record_marker(BatchHeader(103, 61, 0, 2, 0, 0x30, 0, 1000, 1000, 7, 4, -1, 1), 2, 6)
    second = table.to_bytes(104)
    assert not is_first_version(second)
    assert ProducerTable.from_bytes(second)[0].to_bytes(104) == second
