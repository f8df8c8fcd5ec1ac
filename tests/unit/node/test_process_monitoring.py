"""Merged health and metrics of several broker processes, and the channel through which their supervisor gets them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from mansio.errors import Unavailable
from mansio.node.processes import control_channel
from mansio.node.processes.control_channel import BrokerEnd, ChannelResponse, SupervisorEnd, asgi_get
from mansio.node.processes.merged_metrics import merge_metrics
from mansio.node.processes.monitoring import monitoring_app
from mansio.node.processes.supervisor import labelled

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

TEXT = """\
# HELP mansio_records_total Records.
# TYPE mansio_records_total counter
mansio_records_total{topic="a{ b",partition="0"} 3.0
# HELP mansio_ready Whether it is ready.
# TYPE mansio_ready gauge
mansio_ready 1.0
"""
OTHER = """\
# HELP mansio_ready Whether it is ready.
# TYPE mansio_ready gauge
mansio_ready 0.0
"""


def test_each_sample_has_its_process_and_each_metric_its_description_once() -> None:
    merged = merge_metrics({1: TEXT, 7: OTHER, 8: ""})
    families = list(text_string_to_metric_families(merged))
    assert [one.name for one in families] == ["mansio_records", "mansio_ready"]
    assert merged.count("# TYPE mansio_ready gauge") == 1
    samples = [(one.name, one.labels, one.value) for family in families for one in family.samples]
    assert samples == [
        ("mansio_records_total", {"process": "1", "topic": "a{ b", "partition": "0"}, 3.0),
        ("mansio_ready", {"process": "1"}, 1.0),
        ("mansio_ready", {"process": "7"}, 0.0),
    ]


class Process:
    """A broker that answers with what it was given; without an answer it does not run."""

    pid = 7

    def __init__(self, answers: dict[str, bytes] | None) -> None:
        self._answers = answers
        self.is_running = answers is not None
        self.restarts = 2

    async def get(self, path: str, within_s: float) -> ChannelResponse:
        del within_s
        if self._answers is None:
            raise Unavailable("it does not run")
        return ChannelResponse(200, self._answers[path])


def answers(*, ready: bool) -> dict[str, bytes]:
    body = {"ready": ready, "degraded": not ready, "reasons": [], "warnings": []}
    return {"/health/ready": json.dumps(body).encode(), "/metrics": OTHER.encode()}


@pytest.mark.parametrize(
    ("second", "status", "degraded"),
    [(answers(ready=True), 200, False), (answers(ready=False), 503, True), (None, 503, False)],
)
def test_all_are_ready_if_each_is(second: dict[str, bytes] | None, status: int, degraded: bool) -> None:
    app = monitoring_app({1: Process(answers(ready=True)), 2: Process(second)}, None)
    found = asyncio.run(asgi_get(app, "/health/ready"))
    body = json.loads(found.body)
    assert (found.status, body["ready"], body["degraded"]) == (status, status == 200, degraded)
    assert body["processes"]["1"]["ready"]
    assert body["processes"]["1"]["pid"] == 7
    if second is None:
        assert body["processes"]["2"]["reasons"] == [{"reason": "not_running", "detail": "it does not run"}]
    assert asyncio.run(asgi_get(app, "/health/live")).status == 200


def test_metrics_of_a_process_that_does_not_run_are_missing_and_that_is_a_metric() -> None:
    app = monitoring_app({1: Process(answers(ready=True)), 2: Process(None)}, Process({}))
    found = asyncio.run(asgi_get(app, "/metrics"))
    samples = {
        (one.name, one.labels.get("process")): one.value
        for family in text_string_to_metric_families(found.body.decode())
        for one in family.samples
    }
    assert samples == {
        ("mansio_broker_process_up", "1"): 1,
        ("mansio_broker_process_up", "2"): 0,
        ("mansio_broker_process_restarts_total", "1"): 2,
        ("mansio_broker_process_restarts_total", "2"): 2,
        ("mansio_etcd_process_up", None): 1,
        ("mansio_etcd_process_restarts_total", None): 2,
        ("mansio_ready", "1"): 0,
    }


def test_the_metrics_of_the_supervisor_are_those_of_the_document() -> None:
    document = (Path(__file__).parents[3] / "docs/how-to/cluster.md").read_text()
    found = asyncio.run(asgi_get(monitoring_app({}, Process({})), "/metrics"))
    exported = set(re.findall(r"^# TYPE (\S+)", found.body.decode(), re.MULTILINE))
    assert exported == set(re.findall(r"`(mansio_\w+_process_\w+)`", document))


def on_a_channel(
    app: Any, work: Callable[[SupervisorEnd, asyncio.Event], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run `work(end, closed)` beside a broker's end on a descriptor that stands for its standard input; `closed` is
    set when that end sees the other one closed."""

    async def main() -> None:
        end = SupervisorEnd()
        descriptor = os.dup(end.broker_descriptor)
        monkeypatch.setattr(control_channel, "STANDARD_INPUT", descriptor)
        closed = asyncio.Event()
        other = BrokerEnd(app, closed.set)
        other.start()
        os.close(descriptor)
        end.broker_has_started()
        try:
            async with asyncio.timeout(30):
                await work(end, closed)
        finally:
            other.stop()
            end.close()

    asyncio.run(main())


def test_a_late_answer_is_not_taken_for_that_of_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    release = asyncio.Event()

    async def slow(_request: Request) -> Response:
        await release.wait()
        return PlainTextResponse("slow")

    async def fast(_request: Request) -> Response:
        return PlainTextResponse("x" * 300_000, status_code=203)

    async def work(end: SupervisorEnd, _closed: asyncio.Event) -> None:
        with pytest.raises(Unavailable, match="no answer within"):
            await end.get("/slow", 0.01)
        release.set()
        assert await end.get("/fast", 20) == ChannelResponse(203, b"x" * 300_000)
        found = await asyncio.gather(*(end.get("/fast", 20) for _ in range(3)))
        assert {len(each.body) for each in found} == {300_000}

    on_a_channel(Starlette(routes=[Route("/slow", slow), Route("/fast", fast)]), work, monkeypatch)


def test_a_slow_response_delays_no_other_path_and_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    release = asyncio.Event()
    asked: list[str] = []

    async def slow(_request: Request) -> Response:
        asked.append("slow")
        await release.wait()
        return PlainTextResponse("slow")

    async def live(_request: Request) -> Response:
        return PlainTextResponse("live")

    async def work(end: SupervisorEnd, _closed: asyncio.Event) -> None:
        waiting = asyncio.ensure_future(end.get("/metrics", 20))
        assert (await end.get("/live", 20)).body == b"live"
        with pytest.raises(Unavailable, match="no answer within"):
            await end.get("/metrics", 0.01)
        release.set()
        assert (await waiting).body == b"slow"
        assert asked == ["slow"], "no second request while one is in progress"
        assert (await end.get("/metrics", 20)).body == b"slow"
        assert asked == ["slow"] * 2

    on_a_channel(Starlette(routes=[Route("/metrics", slow), Route("/live", live)]), work, monkeypatch)


def test_an_application_that_fails_answers_and_the_broker_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(scope: dict[str, Any], _receive: object, send: Callable[[dict[str, Any]], Any]) -> None:
        if scope["path"] == "/metrics":
            raise OSError("no space left")
        await send({"type": "http.response.start", "status": 200})

    async def work(end: SupervisorEnd, closed: asyncio.Event) -> None:
        assert await end.get("/metrics", 20) == ChannelResponse(500, b"")
        assert (await end.get("/health/live", 20)).status == 200
        assert not closed.is_set()

    on_a_channel(app, work, monkeypatch)


def with_raw_broker(work: Callable[[SupervisorEnd, socket.socket], Any]) -> None:
    """Run `work(end, broker)` with the bare socket of a broker."""

    async def main() -> None:
        end = SupervisorEnd()
        broker = socket.socket(fileno=os.dup(end.broker_descriptor))
        broker.setblocking(False)
        end.broker_has_started()
        try:
            async with asyncio.timeout(30):
                await work(end, broker)
        finally:
            end.close()
            broker.close()

    asyncio.run(main())


def test_a_timeout_within_a_response_loses_no_framing() -> None:
    async def work(end: SupervisorEnd, broker: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        waiting = asyncio.ensure_future(end.get("/metrics", 0.2))
        assert await loop.sock_recv(broker, 100) == b"1 /metrics\n"
        await loop.sock_sendall(broker, b"1 200 6\nab")
        with pytest.raises(Unavailable, match="no answer within"):
            await waiting
        other = asyncio.ensure_future(end.get("/health/ready", 20))
        assert await loop.sock_recv(broker, 100) == b"2 /health/ready\n"
        await loop.sock_sendall(broker, b"cd\nf2 503 2\n{}")
        assert await other == ChannelResponse(503, b"{}")
        third = asyncio.ensure_future(end.get("/metrics", 20))
        assert await loop.sock_recv(broker, 100) == b"3 /metrics\n"
        await loop.sock_sendall(broker, b"3 200 0\n")
        assert await third == ChannelResponse(200, b"")

    with_raw_broker(work)


@pytest.mark.parametrize(
    "text", [b"x" * 9_000, b"1 200 -1\n", b"1 200 999999999999\n", b"7 200 0\n", b"\n", b"a b c\n"]
)
def test_what_is_no_response_counts_as_none(text: bytes) -> None:
    async def work(end: SupervisorEnd, broker: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        waiting = asyncio.ensure_future(end.get("/health/live", 20))
        assert await loop.sock_recv(broker, 100) == b"1 /health/live\n"
        await loop.sock_sendall(broker, text)
        with pytest.raises(Unavailable, match="cannot be read"):
            await waiting
        with pytest.raises(Unavailable):
            await end.get("/metrics", 20)

    with_raw_broker(work)


def test_a_broker_sees_the_end_of_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(end: SupervisorEnd, closed: asyncio.Event) -> None:
        assert (await end.get("/", 20)).status == 404
        assert not closed.is_set()
        end.close()
        await closed.wait()

    on_a_channel(Starlette(), work, monkeypatch)


def test_a_line_of_a_broker_names_it_and_json_stays_json() -> None:
    assert labelled(b"2026 INFO x\n", 3, is_json=False) == b"[3] 2026 INFO x\n"
    assert json.loads(labelled(b'{"event": "x"}\n', 3, is_json=True)) == {"process": 3, "event": "x"}
    assert labelled(b"Traceback\n", 3, is_json=True) == b"Traceback\n"
