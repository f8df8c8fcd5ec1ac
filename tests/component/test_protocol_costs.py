"""Listeners of other protocols that have no requests cost Kafka's requests nothing: the calls that a broker makes per
request are counted."""

from __future__ import annotations

import http.client
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import grpc
import pytest

from component.test_delay_costs import REQUESTS, SOURCE, CountedBroker, requests_for
from mansio.testing import TestBroker
from support.machine import scaled


class OpenConnections:
    """An idle connection of each protocol, which has had an answer."""

    def __init__(self, broker: TestBroker, stack: ExitStack) -> None:
        timeout_s = scaled(30)
        self._lines = []
        for url in (broker.http_url, broker.sqs_url):
            line = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
            self._lines.append(stack.enter_context(closing(line)))
        channel = stack.enter_context(grpc.insecure_channel(broker.grpc_address))
        self._call = channel.unary_unary("/mansio.v1.Mansio/ListTopics")
        self._timeout_s = timeout_s
        self.ask()

    def ask(self) -> None:
        """Make a request on each connection."""
        for line in self._lines:
            line.request("GET", "/v1/topics")
            line.getresponse().read()
        self._call(b"", timeout=self._timeout_s)


class CountedProtocols(CountedBroker):
    """Counts the calls of requests of the other protocols, to show that they can be seen."""

    def __init__(self, broker: TestBroker, connections: OpenConnections) -> None:
        super().__init__(broker)
        self._connections = connections

    def _ask(self, request: bytes) -> None:
        self._connections.ask()


@pytest.mark.row("A2", "A3", "A4")
def test_idle_listeners_of_all_protocols_take_no_call_more() -> None:
    found: dict[bool, dict[str, int]] = {False: {}, True: {}}
    for has_others, fewest in found.items():
        with TestBroker() as broker, ExitStack() as stack:
            broker.client().admin.create_topic("plain", partitions=1)
            if has_others:
                connections = OpenConnections(broker, stack)
            counted = stack.enter_context(closing(CountedBroker(broker)))
            for name, request in requests_for("plain").items():
                fewest[name], _ = counted.calls_of(request)
            if has_others:
                others = stack.enter_context(closing(CountedProtocols(broker, connections)))
                _, functions = others.calls_of(b"")
                for folder in ("http", "grpc", "sqs"):
                    assert any(name.startswith(str(SOURCE / "api" / folder)) for name in functions), folder
    assert found[True] == found[False]
    assert min(found[True].values()) > 10 * REQUESTS
