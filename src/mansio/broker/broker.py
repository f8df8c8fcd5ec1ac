"""One broker, put together: ports, metadata, logs, coordinators, the Kafka door; and taken apart in the right order.

Start: lock the data directory, read the metadata, recover every log, load the groups, and only then listen.
Stop: listen no more, answer what is being worked on, sync everything once more, close. A step that fails while
starting undoes those before it.

Owns every other part; none of them knows this one.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from mansio.broker.server import Server
from mansio.broker.service import Service
from mansio.config import Address

if TYPE_CHECKING:
    from mansio.config import Settings

logger = logging.getLogger(__name__)

NEVER_MS = 1 << 60


class Broker:
    """See the module. `start` and `stop` are called once each, on the same running loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.kafka_address = Address("", 0)
        self._stack = AsyncExitStack()
        self._service: Service | None = None
        self._server: Server | None = None
        self._stopping = False

    @property
    def service(self) -> Service:
        """What the doors call. There from `start` on."""
        assert self._service is not None, "the broker has not been started"
        return self._service

    async def start(self) -> None:
        """Return when clients can connect; raise what kept it from starting."""
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
