"""`mansio` that records the Kafka requests that it runs: `python recording_serve.py FILE serve ...`.

Each request is a line of FILE: the name of its API, the id and the host of its client, separated by tabs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mansio.api.kafka.server.listener import KafkaServer
from mansio.cli.main import main
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from mansio.wire.headers import RequestHeader


class RecordedRequest(NamedTuple):
    """A request, as its handler gets it."""

    api: str
    client_id: str
    host: str


def recorded_requests(file: Path) -> set[RecordedRequest]:
    """The different requests of a broker so far."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return {RecordedRequest(*line.rstrip("\n").split("\t")) for line in lines if line.endswith("\n")}


if __name__ == "__main__":
    requests = Path(sys.argv.pop(1)).open("a", buffering=1)  # noqa: SIM115 - open until the broker ends
    dispatch = KafkaServer._dispatch

    def recorded(self: KafkaServer, connection: Any, header: RequestHeader, frame: memoryview) -> Any:
        name = ApiKey(header.api_key).name
        requests.write(f"{name}\t{header.client_id or ''}\t{connection.client_host}\n")
        return dispatch(self, connection, header, frame)

    KafkaServer._dispatch = recorded
    main()
