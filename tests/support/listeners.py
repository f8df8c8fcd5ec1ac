"""Listeners and their addresses, for tests that build brokers or requests without sockets."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from mansio.broker.services.cluster import ServedListener
from mansio.config.listeners import DEFAULT_LISTENER, SecurityProtocol
from mansio.metadata.model import BrokerEndpoint, BrokerState
from mansio.wire.headers import read_request_header


def served_listener(
    host: str = "broker",
    port: int = 9092,
    *,
    name: str = DEFAULT_LISTENER,
    node_id: int = 1,
    rack: str | None = None,
) -> ServedListener:
    """A listener of broker `node_id` that advertises an address."""
    return ServedListener(name, SecurityProtocol.PLAINTEXT, BrokerEndpoint(node_id, host, port, rack))


def broker_state(
    node_id: int, host: str, port: int, rack: str | None, epoch: int, *listeners: str
) -> BrokerState:
    """A broker with a session that advertises the same address for all `listeners`, or PLAINTEXT."""
    endpoint = BrokerEndpoint(node_id, host, port, rack)
    return BrokerState(
        node_id, host, port, rack, epoch, dict.fromkeys(listeners or (DEFAULT_LISTENER,), endpoint)
    )


class AskedListeners:
    """The listeners through which clients of embedded brokers make requests."""

    def __init__(self) -> None:
        self.by_client: defaultdict[str, set[str]] = defaultdict(set)
        """Names of listeners by client id."""
        self.requests: defaultdict[str, set[int]] = defaultdict(set)
        """API keys by client id."""

    def intercept(self, begin: Any) -> Any:
        """See `KafkaServer`."""

        def noted(connection: Any, frame: memoryview) -> Any:
            header = read_request_header(frame)
            self.by_client[header.client_id or ""].add(connection.listener.name)
            self.requests[header.client_id or ""].add(header.api_key)
            return begin(connection, frame)

        return noted
