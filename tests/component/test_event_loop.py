"""The event loop of a broker: which errors without a handler it logs."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from mansio.host.asyncio_loop import new_event_loop


def test_ends_of_tls_connections_are_not_logged_as_errors_and_others_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("uvloop")

    def logged(transport: asyncio.BaseTransport, error: Exception, message: str) -> bool:
        caplog.clear()
        context = {"message": message, "exception": error, "transport": transport}
        asyncio.get_running_loop().call_exception_handler(context)
        return bool([record for record in caplog.records if record.levelno >= logging.ERROR])

    async def work() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        transport, _ = await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname()[:2])
        late, of_tls = RuntimeError("the handler is closed"), "Fatal error on SSL protocol"
        assert logged(transport, late, of_tls)  # it is open
        transport.abort()
        assert not logged(transport, late, of_tls)
        assert logged(transport, late, "something else")
        assert logged(transport, ValueError("not a late write"), of_tls)
        server.close()
        for error, is_logged in ((ConnectionResetError(), False), (OSError("another"), True)):
            caplog.clear()
            loop.create_future().set_exception(error)  # nobody has it any more
            gc.collect()
            assert bool(caplog.records) is is_logged

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work())
