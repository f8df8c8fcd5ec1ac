"""Dramatiq with its published broker for SQS: the limits that docs/how-to/frameworks.md lists."""

from __future__ import annotations

import queue
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import dramatiq
import pytest
from dramatiq_sqs import SQSBroker

from mansio.testing import TestBroker
from support.machine import scaled
from support.process import inherited
from support.sqs import message_counts, sqs_client
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VISIBILITY_TIMEOUT_S = 900
RESULT_S = 20
MS_MAX = 900_000
"""The longest delay of SQS."""
KILLED = """
import os, signal
import dramatiq
from dramatiq_sqs import SQSBroker

broker = SQSBroker(endpoint_url=os.environ["SQS_URL"], visibility_timeout=900)
dramatiq.set_broker(broker)

@dramatiq.actor
def charge(name):
    os.kill(os.getpid(), signal.SIGKILL)

dramatiq.Worker(broker, worker_threads=1).start()
signal.pause()
"""


actor: Any = dramatiq.actor  # of its types, none has the options of its middleware


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestBroker]:
    with TestBroker() as broker:
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        yield broker


@pytest.fixture
def tasks(broker: TestBroker) -> Iterator[SQSBroker]:
    """Dramatiq's broker; its workers are those of the test."""
    tasks = SQSBroker(endpoint_url=broker.sqs_url, visibility_timeout=VISIBILITY_TIMEOUT_S)
    yield tasks
    tasks.close()


@pytest.fixture
def sqs(broker: TestBroker) -> Any:
    return sqs_client(broker.sqs_url)


@pytest.mark.full
def test_a_task_of_a_killed_process_of_dramatiq_runs_again_after_the_visibility_timeout(
    broker: TestBroker, tasks: SQSBroker, sqs: Any, tmp_path: Path
) -> None:
    ran: queue.Queue[str] = queue.Queue()
    charge: Any = actor(ran.put, actor_name="charge", broker=tasks)
    charge.send("ann")
    environment = {**inherited(), "SQS_URL": broker.sqs_url}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], cwd=tmp_path, env=environment, timeout=scaled(60), check=False
    )
    assert killed.returncode == -9
    assert message_counts(sqs, "default") == (0, 1, 0)
    worker = dramatiq.Worker(tasks, worker_threads=1, worker_timeout=1000)
    worker.start()
    broker.clock.advance(seconds=VISIBILITY_TIMEOUT_S - 60)
    assert ran.empty()
    broker.clock.advance(seconds=61)
    assert ran.get(timeout=scaled(RESULT_S)) == "ann"
    wait_until(lambda: message_counts(sqs, "default") == (0, 0, 0), 30, "an empty queue")
    worker.stop()


@pytest.mark.full
def test_a_retry_of_dramatiq_is_a_delay_of_the_broker_and_is_lost_if_it_is_longer_than_sqs_can_delay(
    broker: TestBroker, tasks: SQSBroker, sqs: Any
) -> None:
    ran: queue.Queue[Any] = queue.Queue()

    def fail_once(name: str) -> None:
        ran.put(name)
        if ran.qsize() == 1:
            raise ValueError(name)

    options = {"broker": tasks, "min_backoff": MS_MAX + 1_000}
    bounded: Any = actor(fail_once, actor_name="bounded", max_backoff=MS_MAX, **options)
    unbounded: Any = actor(fail_once, actor_name="unbounded", **options)
    worker = dramatiq.Worker(tasks, worker_threads=1, worker_timeout=1000)
    worker.start()
    bounded.send("ann")
    wait_until(lambda: ran.qsize() == 1 and message_counts(sqs, "default") == (0, 0, 1), 30, "the retry")
    broker.clock.advance(seconds=MS_MAX // 1000)
    wait_until(lambda: list(ran.queue) == ["ann", "ann"], 30, "the second attempt")
    wait_until(lambda: message_counts(sqs, "default") == (0, 0, 0), 30, "an empty queue")
    ran.queue.clear()
    unbounded.send("bob")
    wait_until(lambda: ran.qsize() == 1 and message_counts(sqs, "default") == (0, 0, 0), 30, "the lost task")
    worker.stop()
