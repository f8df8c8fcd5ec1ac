"""`mansio why GROUP` names what keeps a group from going on, and the command that helps: staged incidents, and groups
that nothing keeps."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

import mansio
from component.why.incidents import (
    INCIDENTS,
    NO_REST,
    SETTINGS,
    SMOKE,
    Expected,
    Stage,
    consumer_group_without_members,
)
from mansio.api.grpc import mansio_pb2 as pb
from mansio.testing import TestBroker
from support.machine import scaled
from support.waiting import wait_until
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(**SETTINGS) as started:
        yield started


def explained(stage: Stage) -> dict[str, Any]:
    found: dict[str, Any] = stage.shell.json("why", stage.name)
    return found


@pytest.mark.row("T8")
@pytest.mark.parametrize(
    ("incident", "topic"),
    [
        pytest.param(
            function, topic, id=function.__name__, marks=() if number < SMOKE else (pytest.mark.full,)
        )
        for number, (function, topic) in enumerate(INCIDENTS)
    ],
)
def test_an_incident_is_named_with_what_helps(
    broker: TestBroker, incident: Callable[[Stage], Expected], topic: dict[str, Any]
) -> None:
    partitions = topic.get("partitions", 1)
    config = {key: value for key, value in topic.items() if key != "partitions"}
    stage = Stage(broker, incident.__name__.replace("_", "-"), partitions=partitions, **config)
    with stage.ends:
        expected = incident(stage)
        check(stage, expected)


def check(stage: Stage, expected: Expected) -> None:
    """The answer may lag behind: what a client has sent, or a commit, may not have arrived."""
    found: dict[str, Any] = {}
    for _ in range(int(scaled(10))):
        found = explained(stage)
        if found["findings"] and found["findings"][0]["cause"] == expected.cause:
            break
    assert found["findings"], found["summary"]
    first = found["findings"][0]
    assert first["cause"] == expected.cause, found
    assert first["impact"] == expected.impact, found
    assert first["command"].startswith(expected.command), first["command"]
    assert {name: first[name] for name in expected.about} == expected.about, first
    assert first["text"] in found["summary"]
    assert found["status"] in ("blocked", "hindered", "waiting")


# -- groups that nothing keeps


@pytest.mark.full
def test_a_busy_consumer_group_is_not_accused(broker: TestBroker) -> None:
    stage = Stage(broker, "busy-readers", partitions=2)
    with stage.ends:
        consumers = [stage.consumer(auto_commit=True, auto_commit_interval_ms=100) for _ in range(2)]
        with working(lambda: _publish_and_read(stage, consumers)):
            assert_not_accused(stage)


@pytest.mark.full
@pytest.mark.parametrize("order", ["none", "key", "partition"])
def test_a_busy_share_group_is_not_accused(broker: TestBroker, order: str) -> None:
    stage = Stage(broker, f"busy-workers-{order}")
    stage.set({**NO_REST, "mansio.share.order": order})
    with stage.ends:
        receivers = [stage.receiver() for _ in range(2)]
        with working(lambda: _publish_and_acknowledge(stage, receivers)):
            assert_not_accused(stage)


@pytest.mark.full
def test_members_that_start_again_and_commit_do_not_fail_at_a_record(broker: TestBroker) -> None:
    """As many rebalances as in the incident of a poison record."""
    stage = Stage(broker, "restarting")
    with stage.ends:
        stage.commit()
        for number in range(4):
            stage.publish(1)
            with stage.client.consume(stage.name, group=stage.name, auto_commit=False) as consumer:
                stage.read(consumer, 1)
                consumer.commit({mansio.TopicPartition(stage.name, 0): number + 1})
        stage.publish(1)
        stage.read(stage.consumer(), 1)
        causes = {each["cause"] for each in explained(stage)["findings"]}
        assert "poison-record" not in causes


@pytest.mark.full
def test_a_group_that_has_done_everything_is_caught_up(broker: TestBroker) -> None:
    stage = Stage(broker, "caught-up")
    with stage.ends:
        stage.publish(5)
        consumer = stage.consumer(auto_commit=True, auto_commit_interval_ms=100)
        stage.read(consumer, 5)
        wait_until(lambda: explained(stage)["status"] == "caught-up" or bool(consumer.poll(timeout_ms=10)))
        found = explained(stage)
        assert (found["status"], found["lag"], found["findings"]) == ("caught-up", 0, [])
        assert "caught up" in stage.shell("why", stage.name)


def assert_not_accused(stage: Stage) -> None:
    """Neither looking for a second nor for a moment, as `group describe` does."""
    wait_until(lambda: explained(stage)["rate"], what="progress")
    for _ in range(2):
        found = explained(stage)
        assert found["findings"] == [], found["summary"]
        assert found["status"] in ("progressing", "caught-up"), found["summary"]
    described = stage.shell.json("group", "describe", stage.name)
    assert described["why"]["findings"] == [], described["why"]["summary"]
    assert "nothing blocks it" in stage.shell("why", stage.name)


@contextmanager
def working(step: Callable[[], object]) -> Iterator[None]:
    """Call `step` again and again in a thread."""
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.is_set():
            step()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _publish_and_read(stage: Stage, consumers: list[Any]) -> None:
    for partition in range(2):
        stage.publish(3, partition=partition)
    for consumer in consumers:
        consumer.poll(timeout_ms=20)


def _publish_and_acknowledge(stage: Stage, receivers: list[Any]) -> None:
    stage.publish(4, key=b"ann")
    for receiver in receivers:
        for message in receiver.poll(timeout_ms=20, max_records=4):
            message.ack()


@pytest.mark.full
def test_a_group_that_does_not_exist_has_no_explanation(broker: TestBroker) -> None:
    shell = Shell(broker.bootstrap_servers)
    assert shell("why", "no-such-group", code=1) == ""
    assert "there is no group" in shell.errors


# -- other protocols


@pytest.mark.full
def test_every_protocol_gives_the_same_answer(broker: TestBroker) -> None:
    stage = Stage(broker, "everywhere")
    with stage.ends:
        expected = consumer_group_without_members(stage)
        shown = explained(stage)
        by_http = httpx.get(f"{broker.http_url}/v1/groups/{stage.name}/why").raise_for_status().json()
        assert without_rates(by_http) == without_rates(shown)
        with grpc.insecure_channel(broker.grpc_address) as channel:
            stub = channel.unary_unary(
                "/mansio.v1.Mansio/ExplainGroup",
                request_serializer=pb.ExplainGroupRequest.SerializeToString,
                response_deserializer=pb.GroupExplanation.FromString,
            )
            by_grpc = stub(pb.ExplainGroupRequest(group=stage.name, sample_ms=0))
        finding = by_grpc.findings[0]
        assert (by_grpc.status, by_grpc.summary) == (shown["status"], shown["summary"])
        assert (finding.cause, finding.records, dict(finding.evidence)) == (
            expected.cause,
            expected.about["records"],
            shown["findings"][0]["evidence"],
        )
        assert not finding.HasField("topic")
        described = stage.shell("group", "describe", stage.name)
        assert shown["summary"] in described
        assert expected.command in described
        table = stage.shell("why", stage.name)
        assert table.splitlines()[0] == shown["summary"]
        assert f"  {expected.command}" in table.splitlines()


def without_rates(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "rate"}
