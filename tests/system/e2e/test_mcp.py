"""`mansio mcp` as a process of its own, asked by the client of the protocol's SDK, with a real broker behind it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

import mansio.blocking
from mansio.cli.mcp.answers import ANSWER_BYTES_MAX
from mansio.client.types import TopicPartition
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.testing import TestBroker
from support.authorization import acl
from support.machine import scaled
from support.paths import free_port, mansio_command
from support.process import inherited
from support.sasl_broker import sasl_broker
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from mcp.types import CallToolResult

GROUP: Final = "billing"
PASSWORD: Final = "correct horse"
SECRETS: Final = ("ann-the-key", "2 apples", "shop-header-value")
CHANGES: Final = {"redrive_dead_letters", "pause_schedule", "resume_schedule"}
Session = ClientSession


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    """A broker with one dead letter, whose record was rejected at its first delivery."""
    with TestBroker() as running:
        client = running.client(client_id="shop")
        client.admin.create_topic("orders", partitions=1, config={"mansio.delay.enable": "true"})
        client.admin.alter_group_config(GROUP, {"share.auto.offset.reset": "earliest"})
        client.publish("orders", b"2 apples", key=b"ann-the-key", headers=[("shop", b"shop-header-value")])
        with client.receive("orders", group=GROUP, max_records=1, prefetch=0) as receiver:
            (message,) = receiver.poll(timeout_ms=scaled(20) * 1000)
            message.reject("no such customer")
        wait_until(lambda: dead_letters(running) == 1, scaled(20))
        yield running


def dead_letters(broker: TestBroker) -> int:
    admin = broker.client().admin
    if "dlq.orders" not in admin.list_topics():
        return 0
    found = admin.list_offsets([TopicPartition("dlq.orders", 0)], "latest")
    return sum(each.offset for each in found.values())


@asynccontextmanager
async def session(
    address: str, *options: str, environment: dict[str, str] | None = None
) -> AsyncIterator[Session]:
    command, *arguments = mansio_command()
    server = StdioServerParameters(
        command=command,
        args=[*arguments, "mcp", *options],
        env={**inherited(), "MANSIO_BOOTSTRAP_SERVERS": address, **(environment or {})},
    )
    async with stdio_client(server) as (reader, writer), ClientSession(reader, writer) as opened:
        await opened.initialize()
        yield opened


def ask(
    address: str,
    work: Callable[[Session], Awaitable[Any]],
    *options: str,
    environment: dict[str, str] | None = None,
) -> Any:
    """The result of `work` with a session of a new server."""

    async def run() -> Any:
        async with asyncio.timeout(scaled(60)), session(address, *options, environment=environment) as opened:
            return await work(opened)

    return asyncio.run(run())


def text_of(result: CallToolResult) -> str:
    (content,) = result.content
    assert content.type == "text"
    assert len(content.text.encode()) <= ANSWER_BYTES_MAX
    return content.text


async def answer(opened: Session, tool: str, **arguments: Any) -> Any:
    result = await opened.call_tool(tool, arguments)
    text = text_of(result)
    assert not result.is_error, text
    return json.loads(text)


async def failure(opened: Session, tool: str, **arguments: Any) -> Any:
    result = await opened.call_tool(tool, arguments)
    assert result.is_error
    return json.loads(text_of(result))["error"]


@pytest.mark.row("T8", "A6")
def test_an_agent_learns_why_a_group_waits_and_what_happened_to_its_last_failure(broker: TestBroker) -> None:
    async def work(opened: Session) -> None:
        tools = {each.name: each for each in (await opened.list_tools()).tools}
        assert {"why", "trace", "list_topics", "cluster_status"} <= tools.keys()
        assert not CHANGES & tools.keys()
        assert all(
            each.annotations is not None and each.annotations.read_only_hint for each in tools.values()
        )
        found = await answer(opened, "why", group=GROUP, sample_s=0)
        assert found["group_id"] == GROUP
        assert found["summary"]
        assert found["command"].startswith("mansio ")
        trace = await answer(opened, "trace", last_failed_of_group=GROUP)
        kinds = [each["kind"] for each in trace["events"]]
        assert kinds[:4] == ["published", "delivered", "rejected", "dead-lettered"]
        assert trace["command"] == f"mansio trace --last-failed {GROUP}"
        assert trace == {
            **await answer(opened, "trace", topic="orders", partition=0, offset=0),
            "command": trace["command"],
        }

    ask(broker.bootstrap_servers, work)


QUESTIONS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("list_topics", {}),
    ("describe_topic", {"topic": "orders"}),
    ("list_groups", {}),
    ("describe_group", {"group": GROUP}),
    ("why", {"group": GROUP}),
    ("trace", {"topic": "orders", "partition": 0, "offset": 0}),
    ("list_dead_letter_topics", {}),
    ("list_dead_letters", {"topic": "orders", "group": GROUP}),
    ("list_schedules", {"topic": "orders"}),
    ("hot_partitions", {}),
    ("cluster_status", {}),
)


@pytest.mark.full
def test_no_answer_has_a_key_or_value_unless_they_are_asked_for(broker: TestBroker) -> None:
    async def texts(opened: Session) -> dict[str, str]:
        names = {each.name for each in (await opened.list_tools()).tools}
        assert names == {name for name, _ in QUESTIONS}
        found = {}
        for name, arguments in QUESTIONS:
            result = await opened.call_tool(name, arguments)
            found[name] = text_of(result)
            assert not result.is_error, found[name]
            assert json.loads(found[name])["command"].startswith("mansio ")
        return found

    hidden = ask(broker.bootstrap_servers, texts)
    assert not [(name, each) for name, text in hidden.items() for each in SECRETS if each in text]
    (row,) = json.loads(hidden["list_dead_letters"])["dead_letters"]
    assert row["untrusted_data"] == {"reason": "no such customer", "header_names": ["shop"]}
    shown = ask(broker.bootstrap_servers, texts, "--show-values")
    (row,) = json.loads(shown["list_dead_letters"])["dead_letters"]
    data = row.pop("untrusted_data")
    assert (data["key"], data["value"]) == SECRETS[:2]
    assert data["headers"] == [{"name": "shop", "value": SECRETS[2]}]
    assert not [each for each in SECRETS if each in json.dumps(row)]


@pytest.mark.full
def test_changes_are_made_only_where_they_are_allowed(broker: TestBroker) -> None:
    client = broker.client()
    client.admin.schedules.create("orders", "nightly", b"run", cron="0 2 * * *")

    async def refused(opened: Session) -> None:
        for name in CHANGES:
            error = await failure(opened, name, topic="orders", name="nightly", group=GROUP)
            assert error == {"type": "InvalidRequest", "message": f"there is no tool '{name}'"}

    ask(broker.bootstrap_servers, refused)
    assert not client.admin.schedules.describe("orders", "nightly").is_paused

    async def allowed(opened: Session) -> None:
        tools = {each.name: each for each in (await opened.list_tools()).tools}
        assert tools.keys() > CHANGES
        assert {
            name for name, each in tools.items() if not (each.annotations and each.annotations.read_only_hint)
        } == CHANGES
        assert (await answer(opened, "pause_schedule", topic="orders", name="nightly"))["paused"]
        assert (await answer(opened, "list_schedules", topic="orders"))["schedules"][0]["paused"]
        assert not (await answer(opened, "resume_schedule", topic="orders", name="nightly"))["paused"]
        tried = await answer(opened, "redrive_dead_letters", topic="orders", group=GROUP, dry_run=True)
        assert tried["results"][0]["redriven"] == 0
        done = await answer(opened, "redrive_dead_letters", topic="orders", position="0:0")
        assert done["results"][0]["redriven"] == 1
        again = await answer(
            opened, "redrive_dead_letters", topic="orders", group=GROUP, redrive_id=done["redrive_id"]
        )
        assert (again["results"][0]["redriven"], again["results"][0]["repeated"]) == (0, 1)

    ask(broker.bootstrap_servers, allowed, "--allow-changes")
    with client.receive("orders", group=GROUP, max_records=1, prefetch=0) as receiver:
        (message,) = receiver.poll(timeout_ms=scaled(20) * 1000)
        assert message.value == b"2 apples"
        message.ack()


@pytest.mark.full
def test_answers_about_many_topics_are_bounded_and_say_what_is_left_out(broker: TestBroker) -> None:
    for number in range(300):
        broker.client().admin.create_topic(f"a-topic-with-a-long-name-{number:03d}", partitions=1)

    async def work(opened: Session) -> None:
        found = await answer(opened, "list_topics")
        assert found["count"] == len(found["topics"]) + found["left_out"]["topics"]
        one = await answer(opened, "list_topics", contains="-277")
        assert one["topics"] == ["a-topic-with-a-long-name-277"]

    ask(broker.bootstrap_servers, work)


@pytest.mark.full
def test_wrong_arguments_and_unknown_names_are_errors_of_one_line(broker: TestBroker) -> None:
    async def work(opened: Session) -> None:
        for tool, arguments in (
            ("why", {}),
            ("why", {"group": ""}),
            ("why", {"group": "g" * 256}),
            ("why", {"group": GROUP, "sample_s": 11}),
            ("why", {"group": GROUP, "sample_s": True}),
            ("why", {"group": GROUP, "other": 1}),
            ("trace", {"topic": "orders"}),
            ("trace", {"last_failed_of_group": GROUP, "topic": "orders"}),
            ("list_dead_letters", {"topic": "orders\n"}),
            ("drop_topic", {}),
        ):
            error = await failure(opened, tool, **arguments)
            assert error["type"] == "InvalidRequest", (tool, arguments, error)
            assert "\n" not in error["message"]
        unknown = await failure(opened, "describe_topic", topic="none")
        assert unknown["type"] == "UnknownTopicOrPartition"
        assert (await failure(opened, "describe_group", group="none"))["type"] == "GroupIdNotFound"

    ask(broker.bootstrap_servers, work)


@pytest.mark.full
def test_an_agent_has_the_rights_of_the_user_and_not_more(tmp_path: Path) -> None:
    with sasl_broker(tmp_path, authorizer="acl", super_users="User:admin") as running:
        for user in ("admin", "alice"):
            running.set_user(user, PASSWORD)
        with mansio.blocking.connect(running.address, user="admin", password=PASSWORD) as admin:
            for topic in ("orders", "salaries"):
                admin.admin.create_topic(topic, partitions=1)
                admin.publish(topic, b"secret")
            admin.admin.acls.create([acl(ResourceType.TOPIC, "orders", Operation.DESCRIBE)])

        async def work(opened: Session) -> None:
            assert (await answer(opened, "list_topics"))["topics"] == ["orders"]
            error = await failure(opened, "trace", topic="orders", partition=0, offset=0)
            assert error["type"] == "TopicAuthorizationFailed"
            assert "\n" not in error["message"]
            error = await failure(opened, "why", group=GROUP)
            assert error["type"].endswith("AuthorizationFailed")

        alice = {"MANSIO_USER": "alice", "MANSIO_PASSWORD": PASSWORD}
        ask(running.address, work, "--show-values", environment=alice)


@pytest.mark.full
def test_without_a_broker_each_call_is_an_error_and_the_server_goes_on() -> None:
    async def work(opened: Session) -> None:
        for _ in range(2):
            assert (await failure(opened, "list_topics"))["type"] == "ConnectionLost"
        assert (await opened.list_tools()).tools

    ask(f"127.0.0.1:{free_port()}", work)


@pytest.mark.full
def test_standard_output_has_the_protocol_only_and_the_server_ends_with_its_input() -> None:
    begin = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    }
    done = subprocess.run(
        [*mansio_command(), "mcp"],
        input=f"no JSON\n{json.dumps(begin)}\n".encode(),
        capture_output=True,
        env={**inherited(), "MANSIO_BOOTSTRAP_SERVERS": "127.0.0.1:1"},
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers[-1]["result"]["serverInfo"]["name"] == "mansio"
    assert "untrusted_data" in answers[-1]["result"]["instructions"]
    assert os.linesep.encode() * 2 not in done.stdout
