"""No Kafka request keeps the others waiting, however many items it has up to its limit."""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import pytest

import mansio
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.item_turns import ITEMS_PER_TURN
from mansio.node.embedded import EmbeddedBroker
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from support.full_requests import APIS, MARGIN, Existing, arrays, full_request
from support.loop_watch import HOLD_S_MAX, LoopWatch, frozen_garbage
from support.machine import scaled
from support.tiers import smoke_first

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.wire.api_versions import Api

PARTITIONS: Final = 50
ONE_STEP: Final = (
    ApiKey.COMMIT_BATCH,
    ApiKey.OFFSET_COMMIT,
    ApiKey.OFFSET_DELETE,
    ApiKey.TXN_OFFSET_COMMIT,
)
"""APIs whose items are committed at once; see docs/reference/compatibility.md."""
CHANGING: Final = (
    ApiKey.ACKNOWLEDGE_RECORDS,
    ApiKey.DELETE_RECORDS,
    ApiKey.DESCRIBE_CONFIGS,
    ApiKey.DESCRIBE_PRODUCERS,
    ApiKey.LEAVE_GROUP,
    ApiKey.LIST_OFFSETS,
    ApiKey.METADATA,
    ApiKey.OFFSET_FETCH,
)
"""APIs that do more for topics and groups that exist."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker with threads of its own: in `TestBroker` all work is on the event loop."""
    with ExitStack() as stack:
        started = stack.enter_context(EmbeddedBroker(tmp_path_factory.mktemp("items") / "data"))
        with mansio.blocking.connect(started.address) as client:
            client.admin.create_topic("items", partitions=PARTITIONS)
        stack.enter_context(frozen_garbage())
        yield started


@pytest.fixture(scope="module")
def existing(broker: EmbeddedBroker) -> Existing:
    with mansio.blocking.connect(broker.address) as client:
        topic_id = client.admin.describe_topic("items").topic_id
    return Existing("items", topic_id, PARTITIONS, "items")


def exchange(address: str, frame: bytes) -> int:
    """Send a request; return the number of bytes of its response, 0 if the connection was closed instead."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=scaled(60)) as connection:
        connection.sendall(frame)
        head = connection.recv(4, socket.MSG_WAITALL)
        if len(head) < 4:
            return 0
        (size,) = struct.unpack(">i", head)
        left = size
        while left and (part := connection.recv(min(left, 1 << 20))):
            left -= len(part)
        assert not left
        return int(size)


def check(broker: EmbeddedBroker, api: Api, existing: Existing | None) -> None:
    for path in arrays(api):
        frame = full_request(api, path, existing)
        watch = LoopWatch(broker)
        try:
            exchange(broker.address, frame)
        finally:
            watch.stop()
        assert watch.held_s_max < scaled(HOLD_S_MAX), f"{'.'.join(path)}: {watch.held_s_max:.3f} s"


@pytest.mark.parametrize(
    "key", smoke_first(ApiKey.DESCRIBE_CONFIGS, ApiKey.DELETE_RECORDS), ids=lambda each: each.name.lower()
)
def test_items_of_a_request_keep_no_client_waiting(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, key: ApiKey
) -> None:
    turns = 0
    sleep = AsyncioScheduler.sleep

    async def counted(scheduler: AsyncioScheduler, delay_ms: float) -> None:
        nonlocal turns
        turns += not delay_ms
        await sleep(scheduler, delay_ms)

    monkeypatch.setattr(AsyncioScheduler, "sleep", counted)
    check(broker, SUPPORTED_APIS[key], None)
    items = SUPPORTED_APIS[key].request_items_max - MARGIN
    assert turns >= 2 * (items // ITEMS_PER_TURN), "while it is read and while it is answered"


@pytest.mark.full
@pytest.mark.parametrize(
    "api", [each for each in APIS if each.key not in ONE_STEP], ids=lambda each: each.key.name.lower()
)
def test_items_of_each_request_keep_no_client_waiting(broker: EmbeddedBroker, api: Api) -> None:
    check(broker, api, None)


@pytest.mark.full
@pytest.mark.parametrize("key", CHANGING, ids=lambda each: each.name.lower())
def test_items_that_exist_keep_no_client_waiting(
    broker: EmbeddedBroker, existing: Existing, key: ApiKey
) -> None:
    check(broker, SUPPORTED_APIS[key], existing)
