"""Large responses to other machines are sent with sendfile, those to this machine through the scratch buffer; the bytes
are the same."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, Producer

import mansio
from support.machine import scaled

if TYPE_CHECKING:
    from pathlib import Path

VALUES = [number.to_bytes(4, "big") * 25_000 for number in range(40)]  # 4 MB


@pytest.mark.row("L9")
@pytest.mark.parametrize("remote", [True, False], ids=["another machine", "loopback"])
def test_stock_client_reads_megabytes_the_same_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    sent: list[int] = []
    true_sendfile = os.sendfile

    def sendfile(*arguments: Any) -> int:
        count = true_sendfile(*arguments)
        sent.append(count)
        return count

    monkeypatch.setattr("os.sendfile", sendfile)
    monkeypatch.setattr("mansio.api.kafka.connections.connection.is_loopback", lambda host: not remote)
    with mansio.Broker(tmp_path) as broker:
        with mansio.blocking.connect(broker.address) as client:
            client.admin.create_topic("large", partitions=1)
        producer = Producer({"bootstrap.servers": broker.address})
        for value in VALUES:
            producer.produce("large", value)
        assert producer.flush(scaled(20)) == 0
        consumer = Consumer(
            {"bootstrap.servers": broker.address, "group.id": "g", "auto.offset.reset": "earliest"}
        )
        consumer.subscribe(["large"])
        read: list[bytes | None] = []
        try:
            while len(read) < len(VALUES):
                message = consumer.poll(20)
                assert message is not None
                assert message.error() is None
                read.append(message.value())
        finally:
            consumer.close()
    assert read == VALUES
    total = sum(map(len, VALUES))
    assert sum(sent) >= total * 0.9 if remote else not sent
