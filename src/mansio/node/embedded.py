"""Embedded broker: a whole broker inside another program, `mansio.Broker(directory)`.

Runs in a thread with its own event loop, and uses neither the program's loop nor any global policy. Ports are free ones
on loopback unless the settings differ. The data survives the program when the directory does. If a program ends without
`close`, it is called at exit: a loop that still runs during interpreter shutdown may crash the process.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from typing import TYPE_CHECKING, Any, Self

from mansio.config.settings import Settings
from mansio.errors import ConfigError, Unavailable
from mansio.host.asyncio_loop import new_event_loop
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

    `directory` contains all its data. Further keywords are settings (`num_partitions=3`), see `mansio.config.settings`.
    With `etcd_endpoints=` and `node_id=` it is a member of a cluster; a program that blocks it for seconds (one long
    call into C) costs it its session, as a pause of the process would.
    """

    def __init__(self, directory: str | os.PathLike[str], **settings: Any) -> None:
        self.settings = Settings(
            **{"listeners": "127.0.0.1:0", "http_listener": "", "data_dir": str(directory), **settings}
        )
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._broker: Broker | None = None

    @property
    def address(self) -> str:
        """`host:port` for any Kafka client."""
        if self._broker is None:
            raise Unavailable("the embedded broker is not running")
        host, port = self._broker.listener_address
        return f"{host}:{port}"

    @property
    def broker(self) -> Broker:
        """The broker itself; its methods belong to its own thread."""
        if self._broker is None:
            raise Unavailable("the embedded broker is not running")
        return self._broker

    def start(self) -> Self:
        """Return when clients can connect. Raises the reason why the broker could not start."""
        if self._thread is not None:
            return self
        if self.settings.etcd_join:
            raise ConfigError(
                "etcd_join: an embedded broker runs no etcd member; set etcd_endpoints=http://HOST:2379"
            )
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mansio-broker", daemon=True)
        self._thread.start()
        broker = Broker(self.settings)
        try:
            self._call(broker.start(), START_S_MAX)
        except BaseException:
            self._end_thread()
            raise
        self._broker = broker
        atexit.register(self.close)
        return self

    def close(self) -> None:
        """Stop as after SIGTERM: answer requests in progress, flush, close. No effect if it is not running."""
        if self._broker is None:
            return
        broker, self._broker = self._broker, None
        atexit.unregister(self.close)
        try:
            self._call(broker.stop(), self.settings.shutdown_drain_ms / 1000 + STOP_MARGIN_S)
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
