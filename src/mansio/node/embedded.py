"""Embedded broker: a complete broker inside another program, `mansio.Broker(directory)`.

It runs in a thread with its own event loop, and changes neither the program's loop nor the event loop policy. By
default it listens on a free port of the loopback interface. If the program ends without `close`, `close` is called at
exit, because a loop that still runs during interpreter shutdown may crash the process.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from typing import TYPE_CHECKING, Any, Self

from mansio.config.settings import DEV_SETTINGS, Settings
from mansio.errors import ConfigError, DataDirectoryLocked, Unavailable
from mansio.host.asyncio_loop import new_event_loop
from mansio.host.platforms import require_posix
from mansio.node.broker import Broker

if TYPE_CHECKING:
    import os
    from collections.abc import Coroutine
    from types import TracebackType

START_S_MAX = 60.0
STOP_MARGIN_S = 10.0


class EmbeddedBroker:
    """A broker in this process.

    >>> with mansio.Broker("data") as broker:
    ...     client = mansio.blocking.connect(broker.address)

    `directory` contains all its data. Further keywords are settings (`num_partitions=3`), see the page Configuration.
    As with `mansio serve --dev`, a topic is created when a client first asks for it, and a consumer group starts
    without waiting for further members; `auto_create_topics_enable=False` and `group_initial_rebalance_delay_ms=500`
    are the values of `mansio serve`.

    With `etcd_endpoints=` and `node_id=` it is a member of a cluster. Then it has the values of `mansio serve`, and the
    program must not hold the GIL for seconds (in one long call of a C function), because the broker would lose its
    session.
    """

    def __init__(self, directory: str | os.PathLike[str], **settings: Any) -> None:
        own = {"listeners": "127.0.0.1:0", "http_listener": "", "data_dir": str(directory)}
        is_member = settings.get("etcd_endpoints") or settings.get("etcd_join")
        self._settings = Settings(**{**own, **({} if is_member else DEV_SETTINGS), **settings})
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._broker: Broker | None = None
        """None while it is not running; its methods may be called only on its thread."""

    @property
    def address(self) -> str:
        """Address of the broker for Kafka clients, as `host:port`, of its first listener.

        Raises `Unavailable` if it is not running."""
        if self._broker is None:
            raise Unavailable("the embedded broker is not running")
        return str(self._broker.listener_address)

    def start(self) -> Self:
        """Start the broker; returns when clients can connect. Raises the error that prevented the start."""
        if self._thread is not None:
            return self
        require_posix("a broker")
        if self._settings.etcd_join:
            raise ConfigError(
                "etcd_join: an embedded broker runs no etcd member; set etcd_endpoints=http://HOST:2379"
            )
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mansio-broker", daemon=True)
        self._thread.start()
        broker = Broker(self._settings)
        try:
            self._call(broker.start(), START_S_MAX)
        except DataDirectoryLocked:
            self._end_thread()
            raise DataDirectoryLocked(
                f"data directory {self._settings.data_dir} is in use by another broker: close it, or use another "
                "directory"
            ) from None
        except BaseException:
            self._end_thread()
            raise
        self._broker = broker
        atexit.register(self.close)
        return self

    def close(self) -> None:
        """Stop the broker: respond to requests in progress, flush, close. No effect if it is not running."""
        if self._broker is None:
            return
        broker, self._broker = self._broker, None
        atexit.unregister(self.close)
        try:
            self._call(broker.stop(), self._settings.shutdown_drain_ms / 1000 + STOP_MARGIN_S)
        finally:
            self._end_thread()

    def _call(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def _end_thread(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._thread = None
        self._loop = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
