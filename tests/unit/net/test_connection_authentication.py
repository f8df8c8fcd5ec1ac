"""Authentication of a connection: nothing overtakes it, and requests keep their order around a second one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import pytest

from mansio.errors import ConnectionLost, SaslAuthenticationFailed
from mansio.net.connection import Connection, ConnectionOptions
from mansio.net.sasl import SaslCredentials
from mansio.wire import headers
from mansio.wire.api_versions import ApiKey, advertised_versions
from mansio.wire.codec import messages
from support.machine import scaled
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

HEARTBEAT = {"group_id": "g", "generation_id": 1, "member_id": "m"}
HANDSHAKE, AUTHENTICATE = 17, 36
REFUSED = 58
SESSION_MS = 400


class Guard:
    """A broker that accepts any password while `may_answer` is set. `received` has the API keys in order of arrival."""

    def __init__(self, session_ms: int = 0) -> None:
        self.received: list[int] = []
        self.session_ms = session_ms
        self.error_code = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.may_answer.set()
        self._server.close()
        await self._server.wait_closed()

    def count(self, api_key: int) -> int:
        return self.received.count(api_key)

    async def open(self, **options: Any) -> Connection:
        credentials = SaslCredentials("alice", "password", "PLAIN")
        return await Connection.open("127.0.0.1", self.port, ConnectionOptions(sasl=credentials, **options))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(4))
                header = headers.read_request_header(await reader.readexactly(length))
                self.received.append(header.api_key)
                if header.api_key == AUTHENTICATE:
                    await self.may_answer.wait()
                if header.api_key != ApiKey.PRODUCE:
                    fields = self._answer(header.api_key)
                    writer.write(
                        messages.encode_response(
                            header.api_key, header.api_version, header.correlation_id, fields
                        )
                    )
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, api_key: int) -> dict[str, Any]:
        if api_key == ApiKey.API_VERSIONS:
            offered = [*advertised_versions(), (HANDSHAKE, 0, 1), (AUTHENTICATE, 0, 2)]
            by_key = {key: (lowest, highest) for key, lowest, highest in offered}
            return {
                "api_keys": [
                    {"api_key": key, "min_version": lowest, "max_version": highest}
                    for key, (lowest, highest) in by_key.items()
                ]
            }
        if api_key == AUTHENTICATE:
            message = "no" if self.error_code else None
            return {
                "error_code": self.error_code,
                "error_message": message,
                "session_lifetime_ms": self.session_ms,
            }
        return {}


def in_scenario(scenario: Callable[[], Any]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(scaled(20.0)):
            await scenario()

    asyncio.run(limited())


def one_way(connection: Connection) -> tuple[bytes]:
    fields = {"mechanism": ""}  # any body does, because the guard reads the header only
    framed = bytearray(
        messages.encode_request(HANDSHAKE, 1, connection.next_correlation_id(), "client", fields)
    )
    framed[4:6] = int(ApiKey.PRODUCE).to_bytes(2)
    framed[6:8] = (8).to_bytes(2)
    return (bytes(framed),)


def test_a_connection_is_open_when_the_client_is_authenticated() -> None:
    async def scenario() -> None:
        async with Guard() as guard:
            connection = await guard.open()
            assert guard.received == [ApiKey.API_VERSIONS, HANDSHAKE, AUTHENTICATE]
            second = await Connection.open("127.0.0.1", guard.port, connection.options, negotiated=connection)
            assert guard.received[3:] == [HANDSHAKE, AUTHENTICATE]
            await asyncio.gather(connection.close(), second.close())

    in_scenario(scenario)


def test_requests_during_a_second_authentication_wait_for_it_in_their_order() -> None:
    async def scenario() -> None:
        async with Guard(SESSION_MS) as guard:
            connection = await guard.open()
            guard.may_answer.clear()
            await eventually(lambda: guard.count(AUTHENTICATE) == 2)
            heartbeat = asyncio.create_task(connection.request(ApiKey.HEARTBEAT, HEARTBEAT))
            await asyncio.sleep(0)
            connection.send_one_way(one_way(connection))
            listed = asyncio.create_task(connection.request(ApiKey.LIST_GROUPS, {}))
            await asyncio.sleep(0)
            assert guard.received[-1] == AUTHENTICATE
            guard.session_ms = 0
            guard.may_answer.set()
            await asyncio.gather(heartbeat, listed)
            assert guard.received[-3:] == [ApiKey.HEARTBEAT, ApiKey.PRODUCE, ApiKey.LIST_GROUPS]
            await connection.request(ApiKey.HEARTBEAT, HEARTBEAT)
            await connection.close()

    in_scenario(scenario)


def test_a_second_authentication_begins_before_the_first_one_ends() -> None:
    async def scenario() -> None:
        async with Guard(SESSION_MS) as guard:
            connection = await guard.open()
            loop = asyncio.get_running_loop()
            timer = connection._reauthentication_timer
            assert timer is not None
            left_s = timer.when() - loop.time()
            assert left_s <= SESSION_MS / 1000 * 0.95
            await eventually(lambda: guard.count(AUTHENTICATE) >= 4)
            await connection.close()
            before = guard.count(AUTHENTICATE)
            await asyncio.sleep(0)
            assert guard.count(AUTHENTICATE) == before

    in_scenario(scenario)


def test_a_refused_second_authentication_ends_the_connection_with_the_reason() -> None:
    async def scenario() -> None:
        async with Guard(SESSION_MS) as guard:
            connection = await guard.open()
            guard.may_answer.clear()
            guard.error_code = REFUSED
            await eventually(lambda: guard.count(AUTHENTICATE) == 2)
            waiting = asyncio.create_task(connection.request(ApiKey.HEARTBEAT, HEARTBEAT))
            await asyncio.sleep(0)
            guard.may_answer.set()
            with pytest.raises(ConnectionLost, match="refused user 'alice'"):
                await waiting
            assert connection.closed
            assert ApiKey.HEARTBEAT not in guard.received
            with pytest.raises(SaslAuthenticationFailed):
                await guard.open()

    in_scenario(scenario)


def test_an_authentication_without_an_answer_has_an_end() -> None:
    async def scenario() -> None:
        async with Guard() as guard:
            guard.may_answer.clear()
            with pytest.raises(ConnectionLost, match="did not respond in time"):
                await guard.open(connect_timeout_ms=100)

    in_scenario(scenario)


def test_a_connection_that_is_closed_during_an_authentication_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        async with Guard(SESSION_MS) as guard:
            connection = await guard.open()
            guard.may_answer.clear()
            await eventually(lambda: guard.count(AUTHENTICATE) == 2)
            waiting = asyncio.create_task(connection.request(ApiKey.HEARTBEAT, HEARTBEAT))
            await asyncio.sleep(0)
            await connection.close()
            with pytest.raises(ConnectionLost):
                await waiting
            assert not [task for task in asyncio.all_tasks() if task.get_name() == "reauthentication"]

    in_scenario(scenario)
