"""kill -9 while clients of all protocols send to, receive from and acknowledge records of one queue.

`protocol_load` has the clients and the checker.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from mansio import blocking
from support.paths import free_port
from support.present import present
from support.process import served
from support.seeds import chosen_seed
from support.sqs import sqs_client
from support.waiting import wait_until
from system.crash.protocol_load import CLIENTS, QUEUE, Addresses, ProtocolLoad

if TYPE_CHECKING:
    from pathlib import Path

PROGRESS_S_MAX = 60.0
PROGRESS_MAX = 15


def kill_and_check(tmp_path: Path, kills: int, seed: int) -> ProtocolLoad:
    chance = random.Random(seed)
    grpc, sqs = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    with served(tmp_path / "data", arguments=["--grpc", grpc, "--sqs", sqs]) as broker:
        addresses = Addresses(broker.bootstrap_servers, broker.http_url, grpc, f"http://{sqs}")
        attributes = {"FifoQueue": "true", "VisibilityTimeout": "2"}
        sqs_client(addresses.sqs).create_queue(QueueName=QUEUE, Attributes=attributes)
        load = ProtocolLoad(addresses)
        load.start()
        for _ in range(kills):
            begin, more = load.progress, chance.randint(1, PROGRESS_MAX)
            wait_until(
                lambda begin=begin, more=more: load.errors or load.progress >= begin + more,
                PROGRESS_S_MAX,
                "records of every protocol are acknowledged",
            )
            load.note("broker", "killed")
            broker.kill()
            broker.start()
            load.note("broker", "started")
        load.end(PROGRESS_S_MAX)
        assert load.errors == [], load.history_of_errors()
        assert load.is_drained()
        with blocking.connect(addresses.kafka) as client:
            load.check_log([present(each.value).decode() for each in client.consume(QUEUE, to_end=True)])
        assert "Traceback" not in broker.text(), broker.text()
    assert min(load.received[kind.name] for kind in CLIENTS) > 0, load.received
    return load


@pytest.mark.row("A2", "A3", "A4", "L5")
@pytest.mark.timeout(180)
def test_a_kill_loses_doubles_and_reorders_nothing_over_any_protocol(tmp_path: Path) -> None:
    kill_and_check(tmp_path, 1, seed=1)


@pytest.mark.full
@pytest.mark.row("A2", "A3", "A4")
@pytest.mark.timeout(600)
def test_twenty_kills_lose_double_and_reorder_nothing_over_all_protocols(tmp_path: Path) -> None:
    load = kill_and_check(tmp_path, 20, seed=chosen_seed())
    print(f"received {dict(load.received)}, stored {sum(map(len, load.sent.values()))}")
