"""A client of HTTP that follows the event stream of a topic."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    import httpx

TIMEOUT_S: Final = 30


class Follower(threading.Thread):
    """Follows the event stream of a topic until it ends."""

    def __init__(self, client: httpx.Client, topic: str = "events") -> None:
        super().__init__(daemon=True)
        self._client = client
        self._path = f"/v1/topics/{topic}/events"
        self.received = ""

    def run(self) -> None:
        with self._client.stream("GET", self._path) as response:
            for text in response.iter_text():
                self.received += text

    def begin(self) -> None:
        self.start()
        wait_until(lambda: "retry" in self.received, scaled(TIMEOUT_S), "the beginning of the stream")

    def has_ended(self) -> bool:
        self.join(scaled(TIMEOUT_S))
        return not self.is_alive()
