"""Produce service without any wire protocol."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.broker.services.produce import BatchResult
from mansio.errors import CorruptMessage, InvalidTopic, UnknownTopicOrPartition, UnsupportedCompression
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.field_values import ACKS_ALL, ACKS_NONE, EARLIEST_TIMESTAMP, LATEST_TIMESTAMP
from support.machine import scaled
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices


def run(tmp_path: Path, work: Callable[[BrokerServices], Coroutine[Any, Any, None]]) -> None:
    """Run `work` on the event loop of a broker with topic t (2 partitions)."""
    with mansio.Broker(tmp_path / "data") as broker:
        with mansio.blocking.connect(broker.address) as client:
            client.admin.create_topic("t", partitions=2)
        asyncio.run_coroutine_threadsafe(
            work(present(broker._broker).service), present(broker._broker).server.loop
        ).result(scaled(30))


def batch(value: bytes = b"value", **options: Any) -> bytes:
    return build_batch([(0, None, value, ())], **options)


def test_batches_of_several_partitions_succeed_or_fail_on_their_own(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        topics: Any = [("t", None, [(0, batch()), (7, batch()), (1, b""), (1, batch())])]
        ((name, _, results),) = await services.produce.produce(
            topics, grants=None, acks=ACKS_ALL, timeout_ms=5000
        )
        assert name == "t"
        assert results[0] == BatchResult(0, None, 0, -1, 0)
        assert [type(one.error) for one in results] == [
            type(None),
            UnknownTopicOrPartition,
            CorruptMessage,
            type(None),
        ]
        assert services.produce.counters.rejected_batches == 2
        assert services.partitions.find("t", None, 0).high_watermark == 1
        assert not services.produce.pending
        assert services.records.list_offset("t", None, 0, LATEST_TIMESTAMP).offset == 1
        assert services.records.list_offset("t", None, 0, EARLIEST_TIMESTAMP).offset == 0

    run(tmp_path, work)


def test_internal_topics_and_excluded_codecs_are_rejected(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        with pytest.raises(UnsupportedCompression):
            services.produce.append(
                "t", None, 0, batch(b"x" * 1000, codec=Codec.ZSTD), acks=ACKS_NONE, allow_zstd=False
            )
        partition = services.partitions.find("t", None, 0)
        partition.internal = True
        with pytest.raises(InvalidTopic):
            services.produce.append("t", None, 0, batch(), acks=ACKS_NONE)

    run(tmp_path, work)


def test_cancel_ends_the_wait_and_not_the_append(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        done: list[object] = []
        pending = services.produce.begin_produce([("t", None, [(0, batch())])], grants=None, acks=ACKS_ALL)
        assert not pending.is_complete
        pending.wait(5000, done.append)
        pending.cancel()
        assert not services.produce.pending
        await services.partitions.find("t", None, 0).commit_promise(1)
        assert done == []

    run(tmp_path, work)


def test_a_batch_that_is_not_committed_in_time_is_reported_as_timed_out(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        done: list[Any] = []
        pending = services.produce.begin_produce([("t", None, [(0, batch())])], grants=None, acks=ACKS_ALL)
        pending.wait(0, done.append)
        services.produce.time_out_requests(services.clock.monotonic() + 10)
        ((_, _, (result,)),) = pending.results
        assert result.error is not None
        assert result.error.kafka_code == 7
        assert done == [pending]

    run(tmp_path, work)
