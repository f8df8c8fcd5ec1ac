"""Connection: every waiter is completed, whatever the peer does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from mansio.errors import ConnectionLost, MansioError, RequestTimedOut, UnsupportedVersion
from mansio.net.connection import Connection, ConnectionOptions
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from support.machine import scaled
from unit.net.stub_broker import HANG_UP, SAY_NOTHING, StubBroker

if TYPE_CHECKING:
    from collections.abc import Callable

HEARTBEAT = {"group_id": "g", "generation_id": 1, "member_id": "m"}


def options(**changes: float) -> ConnectionOptions:
    return ConnectionOptions(**{"connect_timeout_ms": 2_000, "request_timeout_ms": 2_000, **changes})  # type: ignore[arg-type]  # the test knows its own types


async def opened(broker: StubBroker, **changes: float) -> Connection:
    return await Connection.open("127.0.0.1", broker.port, options(**changes))


def test_pipelined_requests_get_their_own_responses() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            broker.answers[ApiKey.HEARTBEAT] = lambda request: {"error_code": request.generation_id}
            connection = await opened(broker)
            answers = await asyncio.gather(
                *(connection.request(ApiKey.HEARTBEAT, {**HEARTBEAT, "generation_id": i}) for i in range(200))
            )
            assert [answer.error_code for answer in answers] == list(range(200))
            await connection.close()

    asyncio.run(scenario())


def test_highest_common_version_is_used() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            broker.offered[ApiKey.HEARTBEAT] = (0, 2)
            broker.offered[ApiKey.SYNC_GROUP] = (7, 9)
            del broker.offered[ApiKey.LIST_GROUPS]
            broker.answers[ApiKey.HEARTBEAT] = lambda request: {"error_code": 0}
            connection = await opened(broker)
            await connection.request(ApiKey.HEARTBEAT, HEARTBEAT)
            assert broker.requests[-1][:2] == (ApiKey.HEARTBEAT, 2)
            assert connection.version_for(ApiKey.HEARTBEAT, highest=1) == 1
            for absent in (ApiKey.SYNC_GROUP, ApiKey.LIST_GROUPS):
                with pytest.raises(UnsupportedVersion):
                    connection.version_for(absent)
            await connection.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("newest", [0, 1, 2, 3])
def test_version_negotiation_falls_back_for_an_older_broker(newest: int) -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            broker.offered[ApiKey.API_VERSIONS] = (0, newest)
            connection = await opened(broker)
            assert broker.requests[-1][1] == newest
            assert connection.versions[ApiKey.METADATA] == (0, 13)
            await connection.close()

    asyncio.run(scenario())


def test_lost_connection_fails_pending_and_later_requests() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            broker.answers[ApiKey.HEARTBEAT] = lambda request: (
                SAY_NOTHING if request.generation_id < 5 else HANG_UP
            )
            connection = await opened(broker)
            asked = [
                connection.request(ApiKey.HEARTBEAT, {**HEARTBEAT, "generation_id": i}) for i in range(6)
            ]
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [ConnectionLost] * 6
            assert connection.closed
            with pytest.raises(ConnectionLost):
                await connection.request(ApiKey.HEARTBEAT, HEARTBEAT)
            await connection.close()

    asyncio.run(scenario())


def test_request_timeout_closes_the_connection() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            broker.answers[ApiKey.HEARTBEAT] = lambda request: SAY_NOTHING
            connection = await opened(broker)
            other = asyncio.ensure_future(connection.request(ApiKey.HEARTBEAT, HEARTBEAT))
            with pytest.raises(RequestTimedOut):
                await connection.request(ApiKey.HEARTBEAT, HEARTBEAT, timeout_ms=50)
            with pytest.raises(ConnectionLost):
                await other
            assert connection.closed
            await connection.close()

    asyncio.run(scenario())


def test_cancelled_request_does_not_affect_later_requests() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            gate = asyncio.Event()

            async def answer(request: object) -> dict[str, int]:
                await gate.wait()
                return {"error_code": request.generation_id}  # type: ignore[attr-defined]  # the test knows its own types

            broker.answers[ApiKey.HEARTBEAT] = answer
            connection = await opened(broker)
            first, second = (
                asyncio.ensure_future(connection.request(ApiKey.HEARTBEAT, {**HEARTBEAT, "generation_id": i}))
                for i in (7, 8)
            )
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
            gate.set()
            assert (await second).error_code == 8
            assert connection.in_flight == 0
            await connection.close()

    asyncio.run(scenario())


def test_in_flight_requests_are_bounded_and_others_queue_in_order() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            gate = asyncio.Event()
            seen: list[int] = []

            async def answer(request: object) -> dict[str, int]:
                seen.append(request.generation_id)  # type: ignore[attr-defined]  # the test knows its own types
                await gate.wait()
                return {"error_code": 0}

            broker.answers[ApiKey.HEARTBEAT] = answer
            connection = await opened(broker, in_flight_requests_max=3)
            asked = [
                asyncio.ensure_future(connection.request(ApiKey.HEARTBEAT, {**HEARTBEAT, "generation_id": i}))
                for i in range(10)
            ]
            await asyncio.sleep(0)
            assert connection.in_flight == 3
            gate.set()
            await asyncio.gather(*asked)
            assert seen == list(range(10))
            await connection.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "rubbish",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\x00\x00\x02ab",
        b"\x00\x00\x00\x08\x7f\xff\xff\xff1234",
        b"\xff" * 64,
    ],
)
def test_protocol_violation_of_the_peer_is_a_typed_error(rubbish: bytes) -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(rubbish)
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            with pytest.raises(ConnectionLost):
                await Connection.open("127.0.0.1", server.sockets[0].getsockname()[1], options())

    asyncio.run(scenario())


def test_refused_connection_is_connection_lost() -> None:
    async def scenario() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        with pytest.raises(ConnectionLost, match=str(port)):
            await Connection.open("127.0.0.1", port, options())

    asyncio.run(scenario())


class Listener:
    """A waiter that is no future: what it received, and how often."""

    def __init__(self, *, is_over: bool = False, on_result: Callable[[], None] = lambda: None) -> None:
        self.reported: list[object] = []
        self.is_over = is_over
        self.on_result = on_result

    def done(self) -> bool:
        return self.is_over or bool(self.reported)

    cancelled = done

    def set_result(self, result: bytes, /) -> None:
        self.reported.append(result)
        self.on_result()

    def set_exception(self, exception: MansioError, /) -> None:
        self.reported.append(exception)


def heartbeat(connection: Connection, generation_id: int) -> tuple[bytes, int]:
    correlation_id = connection.next_correlation_id()
    fields = {**HEARTBEAT, "generation_id": generation_id}
    return messages.encode_request(ApiKey.HEARTBEAT, 4, correlation_id, "x", fields), correlation_id


def test_shorter_deadline_of_a_later_request_applies() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            broker.answers[ApiKey.HEARTBEAT] = lambda request: SAY_NOTHING
            connection = await opened(broker, request_timeout_ms=60_000)
            patient = asyncio.ensure_future(connection.request(ApiKey.HEARTBEAT, HEARTBEAT))
            await asyncio.sleep(0)
            async with asyncio.timeout(scaled(10)):
                with pytest.raises(RequestTimedOut):
                    await connection.request(ApiKey.HEARTBEAT, HEARTBEAT, timeout_ms=30)
                with pytest.raises(ConnectionLost):
                    await patient
            await connection.close()

    asyncio.run(scenario())


def test_longer_deadline_still_applies_after_the_shorter_one_was_met() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            broker.answers[ApiKey.HEARTBEAT] = lambda request: (
                SAY_NOTHING if request.generation_id == 2 else {"error_code": 0}
            )
            connection = await opened(broker)
            shorter_ms = scaled(0.2) * 1000
            longer_ms = shorter_ms + 100
            begun = asyncio.get_running_loop().time()
            await connection.request(ApiKey.HEARTBEAT, HEARTBEAT, timeout_ms=shorter_ms)
            with pytest.raises(RequestTimedOut):
                await connection.request(
                    ApiKey.HEARTBEAT, {**HEARTBEAT, "generation_id": 2}, timeout_ms=longer_ms
                )
            assert asyncio.get_running_loop().time() - begun >= longer_ms / 1000 - 0.005
            await connection.close()

    asyncio.run(scenario())


def test_timeout_of_a_cancelled_request_does_not_close_the_connection() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            gate = asyncio.Event()

            async def answer(request: object) -> dict[str, int]:
                await gate.wait()
                return {"error_code": 0}

            broker.answers[ApiKey.HEARTBEAT] = answer
            connection = await opened(broker)
            impatient = asyncio.ensure_future(connection.request(ApiKey.HEARTBEAT, HEARTBEAT, timeout_ms=40))
            other = asyncio.ensure_future(connection.request(ApiKey.HEARTBEAT, HEARTBEAT))
            await asyncio.sleep(0)
            impatient.cancel()
            await asyncio.sleep(
                0.08
            )  # past its deadline: nothing may happen, so there is nothing to wait for
            assert not connection.closed
            gate.set()
            assert (await other).error_code == 0
            await connection.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("ending", ["answer", "silence", "hang up", "abort"])
def test_custom_waiter_is_completed_exactly_once(ending: str) -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            broker.answers[ApiKey.HEARTBEAT] = lambda request: {
                "answer": {"error_code": 0},
                "hang up": HANG_UP,
            }.get(ending, SAY_NOTHING)
            connection = await opened(broker)
            listener, gone = Listener(), Listener(is_over=True)
            for waiter in (listener, gone):
                framed, correlation_id = heartbeat(connection, 1)
                timeout_ms = 50 if ending == "silence" else 60_000
                connection.begin_exchange((framed,), correlation_id, waiter, timeout_ms=timeout_ms)
            if ending == "abort":
                connection.abort()
            async with asyncio.timeout(scaled(10)):
                while not listener.reported:  # noqa: ASYNC110  # the test has a deadline
                    await asyncio.sleep(0.001)
            await connection.close()
            expected = {"answer": bytes, "silence": RequestTimedOut}.get(ending, ConnectionLost)
            assert [type(reported) for reported in listener.reported] == [expected]
            assert gone.reported == []

    asyncio.run(scenario())


def test_request_cancelled_while_queued_is_not_sent() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            gate = asyncio.Event()

            async def answer(request: object) -> dict[str, int]:
                await gate.wait()
                return {"error_code": 0}

            broker.answers[ApiKey.HEARTBEAT] = answer
            connection = await opened(broker, in_flight_requests_max=1)
            first, gone, last = Listener(), Listener(), Listener()
            for number, waiter in enumerate((first, gone, last)):
                framed, correlation_id = heartbeat(connection, number)
                connection.begin_exchange((framed,), correlation_id, waiter)
            gone.is_over = True
            gate.set()
            async with asyncio.timeout(scaled(10)):
                while not last.reported:  # noqa: ASYNC110  # the test has a deadline
                    await asyncio.sleep(0.001)
            assert [request.generation_id for request in broker.asked(ApiKey.HEARTBEAT)] == [0, 2]
            assert connection.in_flight == 0
            await connection.close()

    asyncio.run(scenario())


def test_request_sent_by_a_response_handler_does_not_overtake_queued_requests() -> None:
    async def scenario() -> None:
        async with StubBroker() as broker:
            broker.answers[ApiKey.HEARTBEAT] = lambda request: {"error_code": 0}
            connection = await opened(broker, in_flight_requests_max=1)

            def begin(number: int, waiter: Listener) -> None:
                framed, correlation_id = heartbeat(connection, number)
                connection.begin_exchange((framed,), correlation_id, waiter)

            last = Listener()
            begin(0, Listener(on_result=lambda: begin(9, last)))
            for number in range(1, 4):
                begin(number, Listener())
            async with asyncio.timeout(scaled(10)):
                while not last.reported:  # noqa: ASYNC110  # the test has a deadline
                    await asyncio.sleep(0.001)
            asked = [request.generation_id for request in broker.asked(ApiKey.HEARTBEAT)]
            assert asked == [0, 1, 2, 3, 9]
            await connection.close()

    asyncio.run(scenario())
