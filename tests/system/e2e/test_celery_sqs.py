"""Celery with kombu's own SQS transport: workers in processes of their own, and a broker whose clock is advanced."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import pytest

from mansio.testing import TestBroker
from support.celery_shop import Worker, close_app, counts, lines, new_app
from support.machine import scaled
from support.sqs import message_counts, sqs_client
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import celery

URL = "sqs://"
RESULT_S = 30
VISIBILITY_TIMEOUT_S = 3600
COUNTDOWN_S = 3
KOMBU_WAIT_S = 10
"""`wait_time_seconds`: what kombu sets as visibility timeout of a task that it returns."""


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestBroker]:
    """A broker that is found by the environment only, as boto3 and kombu look for it."""
    with TestBroker() as broker:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", broker.sqs_url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        yield broker


@pytest.fixture
def app(broker: TestBroker, tmp_path: Path) -> Iterator[celery.Celery]:
    app = new_app(URL, str(tmp_path), VISIBILITY_TIMEOUT_S)
    yield app
    close_app(app)


@functools.cache
def client(url: str) -> Any:
    return sqs_client(url)


def messages(broker: TestBroker, queue: str = "celery") -> tuple[int, int, int]:
    """How many messages of a queue are visible, in flight, and delayed."""
    return message_counts(client(broker.sqs_url), queue)


def worker(place: Path, name: str, *arguments: str, url: str = URL) -> Worker:
    return Worker(url, place, name, "-c", "1", *arguments, lease_s=VISIBILITY_TIMEOUT_S)


def test_tasks_over_sqs_run_once_with_a_countdown_of_the_worker_and_a_delay_of_the_broker(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    with worker(tmp_path, "one") as one:
        assert app.send_task("add", (1, 2)).get(timeout=scaled(RESULT_S)) == 3
        assert app.send_task("add", (3, 4), countdown=1).get(timeout=scaled(RESULT_S)) == 7
        delayed = app.send_task("add", (5, 6), DelaySeconds=600)
        wait_until(lambda: messages(broker) == (0, 0, 1), 30, "one delayed message")
        broker.clock.advance(seconds=601)
        assert delayed.get(timeout=scaled(RESULT_S)) == 11
        wait_until(lambda: messages(broker) == (0, 0, 0), 30, "an empty queue")
        broker.clock.advance(seconds=VISIBILITY_TIMEOUT_S + 1)
        assert app.send_task("add", (7, 8)).get(timeout=scaled(RESULT_S)) == 15
        one.stop()
        assert one.process.returncode == 0, one.log.read_text()
    assert counts(tmp_path, "add") == {"add 1 2": 1, "add 3 4": 1, "add 5 6": 1, "add 7 8": 1}


@pytest.mark.full
def test_a_task_of_a_killed_worker_runs_again_over_sqs_after_the_visibility_timeout_and_not_before(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    with worker(tmp_path, "one") as one:
        one.wait_ready()
        app.send_task("late", (1, 600))
        wait_until(lambda: lines(tmp_path) == ["begin 1 one"], 30, "the task")
        one.kill()
    app.send_task("add", (1, 2))
    with worker(tmp_path, "other") as other:
        wait_until(lambda: counts(tmp_path, "add"), 60, "the other task")
        broker.clock.advance(seconds=VISIBILITY_TIMEOUT_S - 60)
        assert app.send_task("add", (3, 4)).get(timeout=scaled(RESULT_S)) == 7
        wait_until(lambda: messages(broker) == (0, 1, 0), 30, "the message of the lost task in flight")
        assert not counts(tmp_path, "begin 1 other")
        broker.clock.advance(seconds=61)
        wait_until(lambda: counts(tmp_path, "begin 1 other"), 30, "the task again")
        other.kill()


@pytest.mark.full
def test_every_task_is_done_over_sqs_although_one_of_two_workers_is_killed(
    broker: TestBroker, app: celery.Celery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_SQS")
    url = broker.sqs_url.replace("http://", "sqs://any:any@")  # the address in the URL of the broker
    app.conf.broker_url = url
    with worker(tmp_path, "one", url=url) as one, worker(tmp_path, "other", url=url) as other:
        one.wait_ready()
        other.wait_ready()
        for number in range(8):
            app.send_task("late", (number, 0.3))
        wait_until(lambda: any(line.endswith(" one") for line in lines(tmp_path)), 30, "a task of the worker")
        one.kill()
        wait_until(lambda: messages(broker)[0] == 0 and len(counts(tmp_path, "end ")) >= 6, 60, "the others")
        broker.clock.advance(seconds=VISIBILITY_TIMEOUT_S + 1)
        wait_until(lambda: len(counts(tmp_path, "end ")) == 8, 60, "all tasks")
        wait_until(lambda: messages(broker) == (0, 0, 0), 30, "an empty queue")


@pytest.mark.full
def test_a_countdown_longer_than_the_visibility_timeout_runs_twice_over_sqs(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    with worker(tmp_path, "one") as one:
        one.wait_ready()
        app.send_task("add", (1, 2), countdown=scaled(COUNTDOWN_S))
        wait_until(lambda: one.log.read_text().count("Task add") == 1, 30, "the task is received")
        broker.clock.advance(seconds=VISIBILITY_TIMEOUT_S + 1)
        wait_until(lambda: counts(tmp_path, "add") == {"add 1 2": 2}, 60, "the task and its copy")
        wait_until(lambda: messages(broker) == (0, 0, 0), 30, "an empty queue")


@pytest.mark.full
def test_tasks_that_a_stopped_worker_had_received_over_sqs_are_visible_after_kombus_wait_and_run_once(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    with worker(tmp_path, "one", "--prefetch-multiplier", "4") as one:
        one.wait_ready()
        for number in range(4):
            app.send_task("late", (number, 1))
        wait_until(lambda: counts(tmp_path, "begin") and messages(broker)[1] == 4, 30, "tasks in flight")
        one.stop()
    rest = 4 - len(counts(tmp_path, "end "))
    assert rest
    assert sum(messages(broker)) == rest
    broker.clock.advance(seconds=KOMBU_WAIT_S + 1)
    assert messages(broker) == (rest, 0, 0)
    with worker(tmp_path, "other"):
        wait_until(lambda: len(counts(tmp_path, "end ")) == 4, 60, "the rest")
        wait_until(lambda: messages(broker) == (0, 0, 0), 30, "an empty queue")
    assert sum(counts(tmp_path, "begin").values()) == 4


@pytest.mark.full
def test_a_rejected_task_over_sqs_is_deleted_or_goes_to_the_dead_letter_queue(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    sqs = client(broker.sqs_url)
    dead = sqs.create_queue(QueueName="dead")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": "2"})
    sqs.create_queue(
        QueueName="with-policy", Attributes={"RedrivePolicy": policy, "VisibilityTimeout": "3600"}
    )
    with worker(tmp_path, "one", "-Q", "celery,with-policy") as one:
        one.wait_ready()
        app.send_task("reject", (1, False))
        app.send_task("reject", (2, False), queue="with-policy")
        wait_until(lambda: len(counts(tmp_path, "reject")) == 2, 30, "both tasks")
        wait_until(lambda: messages(broker) == (0, 0, 0), 30, "an empty queue")
        assert messages(broker, "with-policy") == (0, 1, 0)
        for _ in range(2):
            broker.clock.advance(seconds=VISIBILITY_TIMEOUT_S + 1)
            wait_until(
                lambda: counts(tmp_path, "reject 2") == {"reject 2 False": 2}, 30, "the second delivery"
            )
        wait_until(lambda: messages(broker, "dead") == (1, 0, 0), 30, "the dead letter")


@pytest.mark.full
def test_a_purge_over_sqs_deletes_all_tasks(broker: TestBroker, app: celery.Celery) -> None:
    for number in range(5):
        app.send_task("add", (number, 0))
    app.send_task("add", (5, 0), DelaySeconds=600)
    assert messages(broker) == (5, 0, 1)
    assert app.control.purge()
    assert messages(broker) == (0, 0, 0)
