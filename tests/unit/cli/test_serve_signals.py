"""Signals of a broker: the end of its supervisor is one reason to stop, although it is seen in two ways."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from mansio.cli.broker import serve

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def test_a_signal_after_the_end_of_the_supervisor_does_not_cut_the_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exits: list[int] = []
    monkeypatch.setattr("os._exit", exits.append)

    async def main() -> None:
        handlers: dict[int, Callable[[], None]] = {}
        monkeypatch.setattr(asyncio.get_running_loop(), "add_signal_handler", handlers.__setitem__)
        stop = asyncio.Event()
        serve._handle_signals(cast("Any", SimpleNamespace(has_certificates=False)), stop)
        stop.set()  # the control channel is closed
        handlers[signal.SIGTERM]()
        assert exits == [], "the signal with which the kernel reports the same end"
        handlers[signal.SIGTERM]()
        assert exits == [serve.FORCED_EXIT_CODE]

    asyncio.run(main())
