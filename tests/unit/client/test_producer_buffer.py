"""Records that wait for buffer space are stored in the order of the calls, whatever their sizes."""

from __future__ import annotations

import asyncio

import pytest

from mansio.errors import ConnectionLost
from support.machine import scaled
from unit.client.model_log import ModelLog
from unit.client.test_producer import producing, run


def sized(number: int, size: int) -> bytes:
    return b"%02d" % number + bytes(size)


def test_small_record_does_not_overtake_a_large_one_waiting_for_space() -> None:
    async def scenario() -> None:
        log = ModelLog()
        async with producing(log, batch_bytes_max=1000, buffer_bytes_max=1000) as (producer, _):
            tasks = []
            wanted = [sized(number, 800 if number % 3 == 0 else 10) for number in range(30)]
            for number, value in enumerate(wanted):
                publish = producer.send if number % 4 == 1 else producer.publish
                tasks.append(asyncio.ensure_future(publish("t", value, partition=0)))
                await asyncio.sleep(0)
            await asyncio.gather(*tasks)
            await producer.flush()
        assert log.values == wanted

    run(scenario)


def test_waiters_after_a_cancelled_one_continue() -> None:
    async def scenario() -> None:
        log = ModelLog()
        async with producing(log, batch_bytes_max=1000, buffer_bytes_max=1000) as (producer, _):
            tasks = []
            for number in range(6):
                tasks.append(asyncio.ensure_future(producer.publish("t", sized(number, 800), partition=0)))
                await asyncio.sleep(0)
            tasks[2].cancel()
            tasks[3].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert [value[:2] for value in log.values if value] == [b"00", b"01", b"04", b"05"]

    run(scenario)


def test_waiters_fail_when_the_producer_is_closed() -> None:
    async def scenario() -> None:
        async with producing(ModelLog(), batch_bytes_max=1000, buffer_bytes_max=1000) as (producer, _):
            tasks = [
                asyncio.ensure_future(producer.publish("t", sized(number, 800), partition=0))
                for number in range(4)
            ]
            await asyncio.sleep(0.05)
            late = [asyncio.ensure_future(producer.publish("t", sized(9, 800))) for _ in range(4)]
            await asyncio.sleep(0)
            await producer.close(flush=False)
            async with asyncio.timeout(scaled(20)):
                outcomes = await asyncio.gather(*tasks, *late, return_exceptions=True)
            assert any(isinstance(outcome, ConnectionLost) for outcome in outcomes)

    run(scenario)


@pytest.mark.parametrize("size", [2000, 990])
def test_record_larger_than_the_buffer_is_accepted_when_it_is_empty(size: int) -> None:
    async def scenario() -> None:
        log = ModelLog()
        async with producing(log, batch_bytes_max=1000, buffer_bytes_max=1000) as (producer, _):
            await asyncio.gather(*(producer.publish("t", sized(n, size), partition=0) for n in range(3)))
        assert [value[:2] for value in log.values if value] == [b"00", b"01", b"02"]

    run(scenario)
