"""Fetch service without any wire protocol."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import mansio
from mansio.broker.routing.caller import ANONYMOUS_USER
from mansio.errors import OffsetOutOfRange, UnknownTopicOrPartition
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.field_values import ACKS_ALL
from support.machine import scaled
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.fetch import FetchResult


class Wanted(NamedTuple):
    index: int = 0  # type: ignore[assignment]  # hides tuple.index
    current_leader_epoch: int = -1
    fetch_offset: int = 0
    last_fetched_epoch: int = -1
    log_start_offset: int = -1
    max_bytes: int = 1 << 20


class Request(NamedTuple):
    topics: list[tuple[str | None, bytes | None, list[Wanted]]]
    replica_id: int = -1
    replica_epoch: int = -1
    max_wait_ms: int = 5000
    min_bytes: int = 1
    max_bytes: int = 1 << 20
    isolation_level: int = 0
    rack_id: str = ""
    is_repair_read: bool = False
    session_id: int = 0
    session_epoch: int = -1
    forgotten_topics: tuple[()] = ()


def request(*wanted: Wanted, **options: Any) -> Request:
    return Request([("t", None, list(wanted))], **options)


def run(tmp_path: Path, work: Callable[[BrokerServices], Coroutine[Any, Any, None]]) -> None:
    with mansio.Broker(tmp_path / "data") as broker:
        with mansio.blocking.connect(broker.address) as client:
            client.admin.create_topic("t", partitions=2)
        asyncio.run_coroutine_threadsafe(
            work(present(broker._broker).service), present(broker._broker).server.loop
        ).result(scaled(30))


async def publish(services: BrokerServices, value: bytes = b"value", partition: int = 0) -> bytes:
    batch = build_batch([(0, None, value, ())])
    await services.produce.produce(
        [("t", None, [(partition, batch)])], grants=None, acks=ACKS_ALL, timeout_ms=5000
    )
    return batch


def test_records_errors_and_positions_are_returned_by_partition(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        batch = await publish(services)
        result, is_final = services.fetch.begin_fetch(
            request(Wanted(0), Wanted(9), Wanted(1, fetch_offset=5)), ANONYMOUS_USER, None, None
        )
        assert is_final
        ((_, _, (first, unknown, beyond)),) = result.topics
        assert first.size_bytes == len(batch) == result.size_bytes
        assert (first.high_watermark, first.last_stable_offset, first.log_start_offset) == (1, 1, 0)
        assert isinstance(unknown.error, UnknownTopicOrPartition)
        assert isinstance(beyond.error, OffsetOutOfRange)

    run(tmp_path, work)


def test_parked_fetch_completes_once_with_what_is_appended_later(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        done: list[FetchResult] = []
        wanted = request(Wanted(0), Wanted(1))
        result, is_final = services.fetch.begin_fetch(wanted, ANONYMOUS_USER, None, None)
        assert not is_final
        services.fetch.park(wanted, ANONYMOUS_USER, None, None, result, done.append)
        assert len(services.fetch.parked) == 1
        await publish(services)
        for _ in range(100):
            if done:
                break
            await asyncio.sleep(0.01)
        (one,) = done
        assert one.size_bytes > 0
        assert not services.fetch.parked

    run(tmp_path, work)


def test_cancelled_fetch_is_not_completed(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        done: list[FetchResult] = []
        wanted = request(Wanted(0))
        result, _ = services.fetch.begin_fetch(wanted, ANONYMOUS_USER, None, None)
        services.fetch.park(wanted, ANONYMOUS_USER, None, None, result, done.append).cancel()
        await publish(services)
        services.fetch.stop()
        assert done == []
        assert not services.fetch.parked

    run(tmp_path, work)


def test_stop_completes_parked_fetches_with_what_there_is(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        done: list[FetchResult] = []
        wanted = request(Wanted(0))
        result, _ = services.fetch.begin_fetch(wanted, ANONYMOUS_USER, None, None)
        services.fetch.park(wanted, ANONYMOUS_USER, None, None, result, done.append)
        services.fetch.stop()
        assert [one.size_bytes for one in done] == [0]

    run(tmp_path, work)
