"""Blocking client as member of share groups: the same names and guarantees as the asyncio client, with handlers on
threads."""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.client import Leased, Receiver
from mansio.client.share import receiver_blocking
from mansio.errors import LeaseLost
from support.client_fixtures import broker_in
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("receive-blocking")) as started:
        yield started


def prepared(client: Any, topic: str, count: int, **settings: str) -> str:
    client.admin.create_topic(topic, partitions=1)
    given = {"share.auto.offset.reset": "earliest", "mansio.retry.backoff.ms": "20", **settings}
    client.admin.alter_group_config(topic, given)
    client.publish_many(topic, [b"%d" % number for number in range(count)])
    return topic


@pytest.mark.row("A5")
@pytest.mark.parametrize(
    ("original", "counterpart"), [(Receiver, receiver_blocking.Receiver), (Leased, receiver_blocking.Leased)]
)
def test_blocking_and_asyncio_clients_have_the_same_api(original: type, counterpart: type) -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")} | set(kind.__annotations__)

    ours = {name for name in public(original) if not name.startswith("_")}
    assert ours == {name for name in public(counterpart) if not name.startswith("_")} - {"wrap"}
    for name in ours:
        theirs = getattr(original, name, None)
        if inspect.isfunction(theirs):
            parameters = [
                each.name for each in inspect.signature(getattr(counterpart, name)).parameters.values()
            ]
            assert parameters == [each.name for each in inspect.signature(theirs).parameters.values()]


@pytest.mark.row("D8")
def test_messages_are_settled_one_by_one_and_together(broker: mansio.Broker) -> None:
    with mansio.blocking.connect(broker.address) as client:
        group = prepared(client, "blocking-settles", 5)
        with client.receive("blocking-settles", group=group) as receiver:
            first = next(receiver)
            first.extend()
            first.ack()
            assert first.is_acknowledged
            with pytest.raises(mansio.MansioError):
                first.ack()
            second = next(receiver)
            second.retry(after=0.2)
            rest = [next(receiver) for _ in range(3)]
            receiver.ack(rest)
            again = next(receiver)
            assert (again.offset, again.delivery_count) == (1, 2)
        assert again.is_lost
        with pytest.raises(LeaseLost):
            again.ack()
        with client.receive("blocking-settles", group=group) as receiver:
            assert [message.offset for message in receiver.poll(5_000)] == [1]


@pytest.mark.row("D8")
def test_handlers_run_on_threads_and_a_stop_waits_for_them(broker: mansio.Broker) -> None:
    with mansio.blocking.connect(broker.address) as client:
        group = prepared(client, "blocking-run", 12)
        receiver = client.receive("blocking-run", group=group)
        threads: set[str] = set()
        done: list[int] = []
        together = threading.Barrier(3)

        def handle(message: mansio.blocking.Leased) -> None:
            threads.add(threading.current_thread().name)
            if message.delivery_count == 1 and message.offset == 4:
                together.wait(scaled(10))
                raise RuntimeError("not yet")
            if message.offset < 3:
                message.extend()
            elif message.offset in (5, 6):
                together.wait(scaled(10))
            done.append(message.offset)
            if len(done) == 12:
                receiver.stop()

        receiver.run(handle, concurrency=3)
        assert sorted(done) == list(range(12))
        assert len(threads) == 3
        assert receiver.is_closed
        place = mansio.TopicPartition("blocking-run", 0)
        state = client.admin.shares.leases(group, [place])[place]
        assert state is not None
        assert state.start_offset == 12
