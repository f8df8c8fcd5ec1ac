"""Celery with Mansio as its broker: workers in processes of their own, and a broker whose clock is advanced."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kombu.exceptions import OperationalError

from mansio.client.types import TopicPartition
from mansio.testing import TestBroker
from support.celery_shop import Worker, close_app, counts, lines, new_app
from support.documents import examples
from support.forked_serve import run_command
from support.machine import scaled
from support.present import present
from support.process import inherited, served
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import celery

    import mansio

TWO_WEEKS_S = 14 * 24 * 3600
RESULT_S = 30


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as broker:
        yield broker


@pytest.fixture
def app(broker: TestBroker, tmp_path: Path) -> Iterator[celery.Celery]:
    app = new_app(broker.bootstrap_servers, str(tmp_path))
    yield app
    close_app(app)


def pending(broker: TestBroker, topic: str = "celery") -> int:
    return sum(found.count for found in broker.client().admin.delays.counts(topic).values())


def leases(broker: TestBroker) -> mansio.ShareLeases | None:
    one = TopicPartition("celery", 0)
    return broker.client().admin.shares.leases("celery", [one])[one]


def queues_of(app: celery.Celery, worker: str) -> list[str]:
    """Names of the queues that a worker consumes."""
    name = f"{worker}@test"
    answers = app.control.inspect([name], timeout=scaled(5), limit=1).active_queues() or {}
    return [queue["name"] for queue in answers.get(name, ())]


def broker_is_idle(broker: TestBroker) -> bool:
    found = leases(broker)
    return found is not None and found.lag == 0


@pytest.mark.full
def test_a_task_runs_and_one_with_a_countdown_of_two_weeks_runs_once_after_two_weeks(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    with Worker(broker.bootstrap_servers, tmp_path, "one", "-c", "1") as worker:
        assert app.send_task("add", (1, 2)).get(timeout=scaled(RESULT_S)) == 3
        worker.wait_ready()
        assert app.control.inspect(timeout=scaled(5), limit=1).ping() == {"one@test": {"ok": "pong"}}
        later = app.send_task("add", (3, 4), countdown=TWO_WEEKS_S)
        assert pending(broker) == 1
        broker.clock.advance(seconds=TWO_WEEKS_S - 60)
        assert pending(broker) == 1
        broker.clock.advance(seconds=61)
        assert later.get(timeout=scaled(RESULT_S)) == 7
        assert (
            app.send_task("add", (5, 6)).get(timeout=scaled(RESULT_S)) == 11
        )  # the worker holds nothing else
        assert counts(tmp_path, "add 3") == {"add 3 4": 1}


@pytest.mark.full
def test_every_task_is_done_although_a_worker_is_killed_in_the_middle_of_one(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    with (
        Worker(broker.bootstrap_servers, tmp_path, "one", "-c", "2", lease_s=3) as one,
        Worker(broker.bootstrap_servers, tmp_path, "other", "-c", "2", lease_s=3) as other,
    ):
        one.wait_ready()
        other.wait_ready()
        for number in range(20):
            app.send_task("late", (number, 0.5))
        wait_until(lambda: any(line.endswith(" one") for line in lines(tmp_path)), 30, "a task of the worker")
        one.kill()
        wait_until(lambda: len(counts(tmp_path, "end ")) == 20, 60, "all tasks")
        begun = [line.split()[1] for line in lines(tmp_path) if line.startswith("begin")]
        interrupted = {number for number in begun if begun.count(number) > 1}
        assert 1 <= len(interrupted) <= 4  # those that had begun, and what it had not begun at most once each
        wait_until(lambda: broker_is_idle(broker), 30, "all acknowledged")


@pytest.mark.full
def test_a_task_that_takes_longer_than_its_lease_runs_once(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    with (
        Worker(broker.bootstrap_servers, tmp_path, "one", "-c", "1", lease_s=4) as one,
        Worker(broker.bootstrap_servers, tmp_path, "other", "-c", "1", lease_s=4) as other,
    ):
        one.wait_ready()
        other.wait_ready()
        app.send_task("late", (1, 10))
        wait_until(lambda: counts(tmp_path, "end 1"), 60, "the end of the task")
        wait_until(lambda: broker_is_idle(broker), 30, "acknowledged")
        assert sum(counts(tmp_path, "begin").values()) == 1
        one.stop()
        assert one.process.returncode == 0, one.log.read_text()


@pytest.mark.full
def test_tasks_are_requeued_rejected_and_run_again_after_their_process_is_lost(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    app.send_task("add", (1, 2))  # creates the queue
    with Worker(broker.bootstrap_servers, tmp_path, "one", "-c", "1"):
        broker.client().publish("celery", b"not of kombu")
        app.send_task("reject", (1, True))
        app.send_task("reject", (2, False))
        app.send_task("crash", (3,))
        wait_until(
            lambda: (
                counts(tmp_path, "re") == {"reject 1 False": 1, "reject 1 True": 1, "reject 2 False": 1}
                and counts(tmp_path, "crash") == {"crash 3": 2}
            ),
            60,
            "tasks",
        )
        wait_until(lambda: "dlq.celery" in broker.client().admin.list_topics(), 30, "dead-letter topic")
        with broker.client().consume("dlq.celery", max_records=2) as consumer:
            rejected = {record.key is None: record.value for record in consumer}
        assert rejected[True] == b"not of kombu"
        assert present(rejected[False]).startswith(b"[[2, false]")
        wait_until(lambda: broker_is_idle(broker), 30, "acknowledged")


@pytest.mark.full
def test_a_revoked_task_does_not_run_whether_it_waits_or_is_delayed(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    delayed = app.send_task("add", (1, 1), countdown=3600)
    kept = app.send_task("add", (2, 2), countdown=3600)
    routed = app.send_task("invoice", (3,), countdown=3600)
    app.control.revoke(delayed.id)  # with no worker that could remember it
    assert pending(broker) == 1
    with Worker(broker.bootstrap_servers, tmp_path, "one", "-c", "1", "-Q", "celery,invoices") as worker:
        worker.wait_ready()
        new_app(broker.bootstrap_servers, str(tmp_path)).control.revoke([routed.id])
        assert pending(broker, "invoices") == 0
        app.send_task("late", (4, 2))
        waiting = app.send_task("add", (5, 5))
        app.control.revoke(waiting.id)
        broker.clock.advance(seconds=3601)
        assert kept.get(timeout=scaled(RESULT_S)) == 4
        wait_until(lambda: waiting.state == "REVOKED", 30, "revoked")
    assert counts(tmp_path, "add") == {"add 2 2": 1}
    assert not counts(tmp_path, "invoice")


@pytest.mark.full
def test_tasks_of_higher_priority_run_first(broker: TestBroker, app: celery.Celery, tmp_path: Path) -> None:
    for priority in (1, 5, 9, 0, 2, 8):
        for number in range(3):
            app.send_task("add", (priority, number), priority=priority)
    with Worker(broker.bootstrap_servers, tmp_path, "one", "-c", "1"):
        wait_until(lambda: len(lines(tmp_path)) == 18, 60, "all tasks")
    ran = [int(line.split()[1]) for line in lines(tmp_path)]
    rank = {9: 0, 8: 0, 5: 1, 0: 1, 1: 2, 2: 2}
    assert [rank[priority] for priority in ran] == [0] * 6 + [1] * 6 + [2] * 6


@pytest.mark.full
def test_events_and_control_commands_reach_their_processes(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    received: list[str] = []
    connection = app.connection_for_read()
    receiver = app.events.Receiver(connection, handlers={"*": lambda event: received.append(event["type"])})
    ready, done = threading.Event(), threading.Event()

    def capture() -> None:
        with receiver.consumer_context() as (connected, _, _):
            ready.set()
            while not done.is_set():
                with contextlib.suppress(TimeoutError):
                    connected.drain_events(timeout=0.1)

    thread = threading.Thread(target=capture, daemon=True)
    thread.start()
    assert ready.wait(scaled(20))
    with (
        contextlib.ExitStack() as stack,
        Worker(broker.bootstrap_servers, tmp_path, "one", "-c", "1", "-E") as one,
        Worker(broker.bootstrap_servers, tmp_path, "other", "-c", "1", "-E") as other,
    ):
        stack.callback(
            done.set
        )  # a thread that runs on would use `random` during the properties of later tests
        one.wait_ready()
        other.wait_ready()
        answers = app.control.inspect(timeout=scaled(5), limit=2).ping()
        assert sorted(answers) == ["one@test", "other@test"]
        assert app.control.add_consumer("extra", reply=True, timeout=scaled(5), destination=["one@test"])
        assert app.send_task("add", (1, 2), queue="extra").get(timeout=scaled(RESULT_S)) == 3
        fanout = {"exchange": "copies", "exchange_type": "fanout", "options": {"auto_delete": True}}
        assert len(app.control.add_consumer("copies", **fanout, reply=True, timeout=scaled(5), limit=2)) == 2
        # Celery answers before it binds the queue, and lists it when it is bound.
        wait_until(lambda: "copies" in queues_of(app, "one") and "copies" in queues_of(app, "other"), 60)
        app.send_task("invoice", (9,), exchange="copies", routing_key="copies")
        wait_until(lambda: counts(tmp_path, "invoice") == {"invoice 9": 2}, 30, "a copy for each worker")
        assert app.control.cancel_consumer("extra", reply=True, timeout=scaled(5), destination=["one@test"])
        assert app.control.pool_grow(2, reply=True, timeout=scaled(5), destination=["one@test"])
        wait_until(
            lambda: {"worker-online", "task-received", "task-succeeded"} <= set(received), 30, "events"
        )
    thread.join(scaled(20))
    connection.close()


@pytest.mark.full
def test_the_worker_goes_on_after_the_broker_was_away_and_publishers_get_an_error_meanwhile(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    with Worker(broker.bootstrap_servers, tmp_path, "one", "-c", "1") as worker:
        worker.wait_ready()
        assert app.send_task("add", (1, 2)).get(timeout=scaled(RESULT_S)) == 3
        with broker.faults.refused_connections(), pytest.raises(OperationalError):
            app.send_task("add", (3, 4), retry=False)
        broker.restart()
        result = app.send_task("add", (5, 6))

        def is_done() -> bool:
            found = leases(broker)
            if found is not None and found.withheld:
                broker.clock.advance(
                    seconds=31
                )  # the broker does not know what was leased before the restart
            return result.ready()

        wait_until(is_done, 60, "the task")
        assert result.get(timeout=scaled(RESULT_S)) == 11
        wait_until(lambda: broker_is_idle(broker), 30, "acknowledged")
        assert counts(tmp_path, "add 5") == {"add 5 6": 1}


@pytest.mark.full
def test_a_worker_connects_again_after_an_error_of_its_group(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    with Worker(broker.bootstrap_servers, tmp_path, "one", "-c", "1") as worker:
        worker.wait_ready()
        assert app.send_task("add", (1, 2)).get(timeout=scaled(RESULT_S)) == 3
        broker.faults.error("ShareGroupHeartbeat", "INVALID_REQUEST")
        wait_until(lambda: "Connection to broker lost" in worker.log.read_text(), 60, "the error")
        assert app.send_task("add", (3, 4)).get(timeout=scaled(RESULT_S)) == 7
        assert app.control.inspect(timeout=scaled(5), limit=1).ping() == {"one@test": {"ok": "pong"}}


@pytest.mark.full
@pytest.mark.parametrize("cause", ["cut connections", "error of the group"])
def test_a_task_that_runs_is_not_started_on_another_worker_when_its_worker_connects_again(
    broker: TestBroker, app: celery.Celery, tmp_path: Path, cause: str
) -> None:
    with (
        Worker(broker.bootstrap_servers, tmp_path, "one", "-c", "1", lease_s=3) as one,
        Worker(broker.bootstrap_servers, tmp_path, "other", "-c", "1", lease_s=3) as other,
    ):
        one.wait_ready()
        other.wait_ready()
        app.send_task("late", (1, 8))
        wait_until(lambda: counts(tmp_path, "begin 1"), 30, "the beginning of the task")
        if cause == "cut connections":
            broker.faults.drop_connections()
        else:
            broker.faults.error("ShareGroupHeartbeat", "INVALID_REQUEST", count=2)
            wait_until(
                lambda: any("Connection to broker lost" in each.log.read_text() for each in (one, other)),
                60,
                "the error",
            )
        for number in range(2, 5):
            app.send_task("late", (number, 0))
        wait_until(lambda: len(counts(tmp_path, "end")) == 4, 60, "the end of all tasks")
        wait_until(lambda: broker_is_idle(broker), 30, "all acknowledged")
        assert sum(counts(tmp_path, "begin 1").values()) == 1


@pytest.mark.full
def test_a_worker_leases_no_more_than_it_prefetches_and_a_purge_deletes_delayed_tasks_as_well(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    with Worker(broker.bootstrap_servers, tmp_path, "one", "-c", "2", "--prefetch-multiplier", "3") as worker:
        worker.wait_ready()
        for number in range(30):
            app.send_task("late", (number, 60))
        app.send_task("add", (1, 2), countdown=3600)
        wait_until(lambda: (found := leases(broker)) is not None and found.leased == 6, 30, "leases")
        with app.connection_for_write() as connection:
            waiting = connection.default_channel.queue_declare("celery", passive=True).message_count
        assert waiting in (24, 25)  # by offsets, of which a delayed task has one
        assert app.control.purge() == waiting + 1
        assert pending(broker) == 0
        found = leases(broker)
        assert found is not None
        assert found.leased <= 6
        wait_until(lambda: sum(counts(tmp_path, "begin").values()) == 2, 30, "both processes of the worker")
    assert sum(counts(tmp_path, "begin").values()) == 2


@pytest.mark.full
def test_tasks_publish_tasks_and_retries_are_delays_of_the_broker(
    broker: TestBroker, app: celery.Celery, tmp_path: Path
) -> None:
    with Worker(broker.bootstrap_servers, tmp_path, "one", "-c", "2"):
        chained = (app.signature("add", (1, 2)) | app.signature("add", (3,))).apply_async()
        assert chained.get(timeout=scaled(RESULT_S)) == 6
        app.send_task("again", (1,))
        wait_until(lambda: pending(broker) == 1, 30, "the retry")
        listed = run_command(["delayed", "list", "celery", "-b", broker.bootstrap_servers], inherited())
        assert listed.returncode == 0, listed.stderr
        assert len(listed.stdout.splitlines()) == 2, listed.stdout
        assert listed.stdout.splitlines()[1].startswith(b"0:"), listed.stdout
        broker.clock.advance(seconds=3600)
        wait_until(
            lambda: counts(tmp_path, "again") == {"again 1 0 False None": 1, "again 1 1 True None": 1},
            30,
            "the second attempt",
        )


@pytest.mark.full
def test_connecting_to_no_broker_fails_in_time_with_one_line(tmp_path: Path) -> None:
    app = new_app("127.0.0.1:1", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(OperationalError) as caught, app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, timeout=2)
    assert time.monotonic() - began < scaled(20)
    assert "\n" not in str(caught.value)


@pytest.mark.full
def test_the_examples_about_celery_work_in_their_order(tmp_path: Path) -> None:
    found = examples("docs/how-to/from-celery.md")
    assert [name for name in found if not name.startswith("sqs-")] == [
        "shop",
        "worker",
        "publish",
        "commands",
        "test",
    ]
    with served(tmp_path / "data", http=False) as broker:
        (tmp_path / "shop.py").write_text(
            found["shop"].code.replace("127.0.0.1:9092", broker.bootstrap_servers)
        )
        environment = {
            **inherited(),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "MANSIO_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
            "PYTHONUNBUFFERED": "1",
        }

        def run(*command: str) -> str:
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=scaled(60),
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        log = tmp_path / "worker.log"
        with log.open("wb") as output:
            command = ["sh", "-euc", f"exec {found['worker'].code}"]
            worker = subprocess.Popen(
                command,
                cwd=tmp_path,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            run(sys.executable, "-W", "error", "-c", found["publish"].code)
            wait_until(lambda: "mail to ann" in log.read_text(), 60, "the mail")
            listed = run("sh", "-euc", found["commands"].code)
        finally:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        for words in ("pong", "bob@example.org", "Purged"):
            assert words in listed, listed
    (tmp_path / "test_shop.py").write_text(found["test"].code)
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "test_shop.py"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=scaled(60))
