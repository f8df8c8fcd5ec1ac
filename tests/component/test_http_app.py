"""HTTP listener over a real socket, with a stub in place of the broker."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Never

import httpx
import pytest
from starlette.routing import Route

from mansio import errors
from mansio.api.asgi import connection as http_connection
from mansio.api.asgi.server import HttpServer
from mansio.api.http.app import assemble
from mansio.api.http.broker_stats import Bounds, Distribution, GroupLag, Measurement, PartitionSample, Phase
from mansio.api.http.health import REASONS_MAX
from mansio.api.http.monitors import STALLS_REPEATED, EventLoopMonitor
from mansio.broker.services.health import Problem
from mansio.host.file_descriptors import OTHER_CONNECTIONS_MAX
from support.machine import scaled
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from starlette.requests import Request

    from mansio.broker.routing.caller import Caller


class View:
    """A broker as the HTTP listener sees it."""

    def __init__(self) -> None:
        self.phase: Phase = "running"
        self.known_problems: list[Problem] = []
        self.worries: list[Problem] = []
        self.bounds = Bounds()
        self.is_in_cluster = False
        self.samples = [PartitionSample("flights", 3, 2, 10, 110, 100, 4096, False)]
        self.numbers: list[Measurement] = []
        self.lags: list[GroupLag] = []
        self.histograms: list[Distribution] = []

    def may_describe(self, caller: Caller) -> bool:
        del caller
        return True

    def problems(self) -> list[Problem]:
        return self.known_problems

    def warnings(self) -> list[Problem]:
        return self.worries

    def on_disk_full_change(self, listener: Callable[[], object]) -> None: ...

    def group_lags(self) -> list[GroupLag]:
        return self.lags

    def distributions(self) -> list[Distribution]:
        return self.histograms

    def partition_samples(self) -> list[PartitionSample]:
        return self.samples

    def measurements(self) -> list[Measurement]:
        return self.numbers


NO_STALL_MS = 60_000
"""For longer than that no machine lets a process wait that has work."""


class LoopClock:
    ahead_s = 0.0

    def wall_ms(self) -> int:
        return int(time.time() * 1000)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


class Timer:
    def cancel(self) -> None: ...


class LoopScheduler:
    def call_later(self, delay_ms: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_ms / 1000, callback, *args)


class HeldScheduler(LoopScheduler):
    """Runs nothing while it is held, as a loop that a request keeps busy; requests are answered nevertheless."""

    is_held = False

    def call_later(self, delay_ms: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        def run() -> None:
            if self.is_held:
                super(HeldScheduler, self).call_later(1, run)
            else:
                callback(*args)

        return super().call_later(delay_ms, run)


@contextlib.asynccontextmanager
async def serving(
    view: View,
    *,
    clock: LoopClock | None = None,
    scheduler: LoopScheduler | None = None,
    extra: Sequence[Route] = (),
) -> AsyncIterator[httpx.AsyncClient]:
    watch = EventLoopMonitor(
        scheduler or LoopScheduler(),
        clock or LoopClock(),
        stall_lag_ms_min=NO_STALL_MS,
        stall_retention_ms=100 * NO_STALL_MS,
    )
    app = assemble(view, watch)
    app.router.routes.extend(extra)
    server = HttpServer(app, "127.0.0.1", 0)
    host, port = await server.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=scaled(10)) as client:
            yield client
    finally:
        await server.stop()


def get(view: View, path: str, **headers: str) -> httpx.Response:
    async def query() -> httpx.Response:
        async with serving(view) as client:
            return await client.get(path, headers=headers)

    return asyncio.run(query())


def test_a_healthy_broker_is_live_and_ready() -> None:
    live, ready = get(View(), "/health/live"), get(View(), "/health/ready")
    assert (live.status_code, live.json()) == (200, {"live": True})
    assert (ready.status_code, ready.json()) == (
        200,
        {"ready": True, "degraded": False, "reasons": [], "warnings": []},
    )


def test_ready_names_every_reason_against_it() -> None:
    view = View()
    view.phase = "stopping"
    view.known_problems = [
        Problem("log_failed", "flights-3: Input/output error", "flights", 3),
        Problem("partition_not_open", "orders-0", "orders", 0),
    ]
    answer = get(view, "/health/ready")
    assert answer.status_code == 503
    assert [(reason["reason"], reason["detail"]) for reason in answer.json()["reasons"]] == [
        ("stopping", "the broker is stopping"),
        ("log_failed", "flights-3: Input/output error"),
        ("partition_not_open", "orders-0"),
    ]
    assert get(view, "/health/live").status_code == 200


def test_a_broker_with_a_warning_is_ready_and_degraded_and_a_thousand_make_a_short_answer() -> None:
    view = View()
    view.worries = [Problem("corrupt_batch", f"t-{n}: damaged", "t", n) for n in range(1000)]
    answer = get(view, "/health/ready")
    body = answer.json()
    assert (answer.status_code, body["ready"], body["degraded"]) == (200, True, True)
    assert body["warnings"][0] == {
        "reason": "corrupt_batch",
        "detail": "t-0: damaged",
        "topic": "t",
        "partition": 0,
    }
    assert (len(body["warnings"]), body["more_warnings"]) == (REASONS_MAX, 1000 - REASONS_MAX)


def test_a_thousand_reasons_make_a_short_answer() -> None:
    view = View()
    view.known_problems = [Problem("log_failed", f"t-{n}: gone") for n in range(1000)]
    body = get(view, "/health/ready").json()
    assert (len(body["reasons"]), body["more"]) == (REASONS_MAX, 1000 - REASONS_MAX)


def test_one_stall_makes_the_broker_unready_only_while_it_happens_and_repeated_ones_for_longer() -> None:
    clock, scheduler = LoopClock(), HeldScheduler()

    async def story() -> list[httpx.Response]:
        answers = []
        async with serving(View(), clock=clock, scheduler=scheduler) as client:
            answers.append(await client.get("/health/ready"))
            for number in range(1, STALLS_REPEATED + 1):
                scheduler.is_held = True
                clock.ahead_s += 2 * NO_STALL_MS / 1000  # as if nothing on this loop had run
                answers.append(await client.get("/health/ready"))
                scheduler.is_held = False

                async def counted(stalls: int = number) -> bool:
                    return f"mansio_event_loop_stalls_total {stalls}.0" in (await client.get("/metrics")).text

                await eventually(counted)
                answers.append(await client.get("/health/ready"))
        return answers

    answers = asyncio.run(story())
    assert [each.status_code for each in answers] == [200, 503, 200, 503, 200, 503, 503]
    during, afterwards = answers[1].json(), answers[2].json()
    assert [each["reason"] for each in during["reasons"]] == ["event_loop_stalled"]
    assert afterwards["ready"]
    assert afterwards["degraded"]
    assert [each["reason"] for each in afterwards["warnings"]] == ["event_loop_stalled"]


def test_a_stall_is_forgotten_and_the_memory_of_stalls_is_bounded() -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def wall_ms(self) -> int:
            return int(self.now * 1000)

    class Scheduler:
        def call_later(self, delay_ms: float, callback: Callable[..., object], *args: Any) -> Timer:
            self.callback = callback
            return Timer()

    clock, scheduler = Clock(), Scheduler()
    watch = EventLoopMonitor(scheduler, clock, stall_lag_ms_min=100, stall_retention_ms=1_000_000)
    watch.start()
    for _ in range(500):
        clock.now += 1
        scheduler.callback()
    assert watch.stalls_total == 500
    assert len(watch.recent_stalls()) == 64
    assert watch.lag_ms_max == pytest.approx(750)
    clock.now += 0.1
    watch.stop()
    clock.now += 1001
    assert watch.recent_stalls() == []


def test_a_beat_overdue_right_now_counts_as_a_stall() -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def wall_ms(self) -> int:
            return int(self.now * 1000)

    class Scheduler:
        def call_later(self, delay_ms: float, callback: Callable[..., object], *args: Any) -> Timer:
            return Timer()

    clock = Clock()
    watch = EventLoopMonitor(Scheduler(), clock, stall_lag_ms_min=100)
    watch.start()
    clock.now = 0.3
    assert watch.recent_stalls() == []
    clock.now = 5
    assert [round(stall.lag_ms) for stall in watch.recent_stalls()] == [4750]


def test_metrics_show_partitions_and_counts_by_prometheus_conventions() -> None:
    view = View()
    view.numbers = [
        Measurement("requests", "counter", "Requests answered.", (("api", "Produce"),), 7),
        Measurement("requests", "counter", "Requests answered.", (("api", "Fetch"),), 5),
        Measurement("connections", "gauge", "Open connections.", (), 2),
    ]
    answer = get(view, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    for line in (
        'mansio_partition_log_end_offset{partition="3",topic="flights"} 110.0',
        'mansio_partition_high_watermark{partition="3",topic="flights"} 100.0',
        'mansio_partition_log_size_bytes{partition="3",topic="flights"} 4096.0',
        'mansio_requests_total{api="Produce"} 7.0',
        'mansio_requests_total{api="Fetch"} 5.0',
        "mansio_connections 2.0",
        "mansio_partitions 1.0",
        "# TYPE mansio_requests_total counter",
    ):
        assert line in answer.text.splitlines()
    assert "process_resident_memory_bytes" in answer.text
    assert "mansio_build_info{version=" in answer.text


def test_metrics_are_openmetrics_for_clients_that_accept_it() -> None:
    answer = get(View(), "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.UnknownTopicOrPartition("no topic x"), 404),
        (errors.TopicAlreadyExists("x exists"), 409),
        (errors.MessageTooLarge("too big"), 413),
        (errors.LeaderNotAvailable("wait"), 503),
        (errors.StorageError("disk"), 500),
    ],
)
def test_every_typed_error_becomes_its_status_and_one_shape(error: errors.MansioError, status: int) -> None:
    async def query() -> httpx.Response:
        async def fail(_request: Request) -> Never:
            raise error

        async with serving(View(), extra=[Route("/fail", fail)]) as client:
            return await client.get("/fail")

    answer = asyncio.run(query())
    assert answer.status_code == status
    assert answer.json() == {
        "error": {
            "type": type(error).__name__,
            "message": error.message,
            "kafka_code": error.kafka_code,
            "retriable": error.retriable,
        }
    }
    assert (answer.headers.get("retry-after") == "1") == (status == 503)


def test_a_failure_of_http_itself_has_the_same_shape() -> None:
    missing = get(View(), "/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"] == {
        "type": "NotFound",
        "message": "nothing answers at /nothing",
        "kafka_code": None,
        "retriable": False,
    }


def test_an_unexpected_exception_shows_the_caller_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async def query() -> httpx.Response:
        async def fail(_request: Request) -> Never:
            raise RuntimeError("secret detail")

        async with serving(View(), extra=[Route("/fail", fail)]) as client:
            return await client.get("/fail")

    answer = asyncio.run(query())
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["type"] == "InternalError"
    assert "secret detail" in caplog.text


def test_a_taken_port_is_an_error_that_names_it_and_leaves_nothing_behind() -> None:
    async def story() -> str:
        async with serving(View()) as client:
            port = client.base_url.port
            assert port is not None
            second = HttpServer(lambda *_: None, "127.0.0.1", port)
            with pytest.raises(OSError, match=f"127.0.0.1:{port}") as refused:
                await second.start()
            await second.stop()
            return str(refused.value)

    assert "cannot listen" in asyncio.run(story())


def test_after_stop_the_port_is_free_again_and_no_connection_is_left() -> None:
    async def story() -> None:
        server = HttpServer(assemble(View(), EventLoopMonitor(LoopScheduler(), LoopClock())), "127.0.0.1", 0)
        host, port = await server.start()
        reader, writer = await asyncio.open_connection(host, port)
        started = time.monotonic()
        await server.stop()
        assert time.monotonic() - started < scaled(10)
        assert await reader.read() == b""
        writer.close()
        again = HttpServer(assemble(View(), EventLoopMonitor(LoopScheduler(), LoopClock())), host, port)
        assert await again.start() == (host, port)
        await again.stop()

    asyncio.run(story())


@contextlib.asynccontextmanager
async def silent_peers(
    client: httpx.AsyncClient, count: int, sent: bytes
) -> AsyncIterator[list[asyncio.StreamReader]]:
    """So many connections that send this much, and then nothing."""
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            stack.callback(writer.close)
            writer.write(sent)
            readers.append(reader)
        yield readers


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health/live HTTP/1.1\r\nHost"], ids=["nothing", "half a request"]
)
def test_many_silent_clients_do_not_keep_a_probe_from_its_answer(sent: bytes) -> None:
    async def story() -> None:
        async with (
            serving(View()) as client,
            silent_peers(client, OTHER_CONNECTIONS_MAX + 5, sent) as readers,
        ):
            assert (await client.get("/health/live")).status_code == 200
            first = [asyncio.ensure_future(reader.read()) for reader in readers[:5]]
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(asyncio.gather(*first), scaled(10))
            assert (await client.get("/health/live")).status_code == 200

    asyncio.run(story())


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health/live HTTP/1.1\r\nHost"], ids=["nothing", "half a request"]
)
def test_a_connection_that_asks_for_nothing_ends(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "UNANSWERED_S_MAX", 0.05)

    async def story() -> None:
        async with serving(View()) as client, silent_peers(client, 1, sent) as (reader,):
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), scaled(10)) == b""

    asyncio.run(story())
