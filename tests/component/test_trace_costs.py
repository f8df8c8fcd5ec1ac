"""What the trace of records costs on the hot path: the calls that a broker makes per request are counted."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from component.test_delay_costs import REQUESTS, SOURCE, CountedBroker, requests_for
from component.test_share_feature_costs import RECORDS, CountedMember
from support.machine import scaled

if TYPE_CHECKING:
    from pathlib import Path

CALLS_PER_RUN_MAX = 3
CALLS_PER_DELIVERY_MAX = 12


def of_the_trace(functions: set[str]) -> set[str]:
    own = (name.removeprefix(str(SOURCE)) for name in functions if name.startswith(str(SOURCE)))
    return {name for name in own if "trace" in name and "traceback" not in name}


class TwoPublishers(CountedBroker):
    """Two connections that publish in turn, so that each batch begins a run."""

    def __init__(self, broker: mansio.Broker) -> None:
        super().__init__(broker)
        self._sockets = [
            self._socket,
            socket.create_connection(self._socket.getpeername(), timeout=scaled(30)),
        ]

    def _ask(self, request: bytes) -> None:
        self._socket = self._sockets[0]
        self._sockets.reverse()
        super()._ask(request)

    def close(self) -> None:
        for each in self._sockets:
            each.close()


@pytest.mark.row("T2")
def test_a_batch_that_begins_a_run_takes_three_calls_and_a_batch_that_extends_it_none(tmp_path: Path) -> None:
    fewest: dict[tuple[Any, bool], int] = {}
    with mansio.Broker(tmp_path) as broker:
        with mansio.blocking.connect(broker.address) as client:
            client.admin.create_topic("traced", partitions=1)
            client.admin.create_topic("plain", partitions=1, config={"mansio.trace.enable": "false"})
        for kind in (CountedBroker, TwoPublishers):
            for topic in ("traced", "plain"):
                counted = kind(broker)
                try:
                    calls, functions = counted.calls_of(requests_for(topic)["produce"])
                finally:
                    counted.close()
                fewest[kind, topic == "traced"] = calls
                assert bool(of_the_trace(functions)) == (topic == "traced" and kind is TwoPublishers)
    assert fewest[CountedBroker, True] == fewest[CountedBroker, False]
    assert fewest[TwoPublishers, True] <= fewest[TwoPublishers, False] + CALLS_PER_RUN_MAX * REQUESTS


@pytest.mark.row("T2")
def test_a_delivery_and_its_acknowledgement_take_twelve_calls_at_most_and_none_without_a_trace(
    tmp_path: Path,
) -> None:
    fewest: dict[bool, int] = {}
    for is_traced in (False, True):
        with mansio.Broker(tmp_path / str(is_traced)) as broker:
            with mansio.blocking.connect(broker.address) as client:
                config = {"mansio.trace.enable": str(is_traced).lower()}
                client.admin.create_topic("plain", partitions=1, config=config)
                client.admin.alter_group_config("g", {"share.auto.offset.reset": "earliest"})
                client.publish_many("plain", [b"x"] * RECORDS)
                topic_id = client.admin.describe_topic("plain").topic_id
            member = CountedMember(broker, "g", topic_id)
            try:
                fewest[is_traced], functions = member.calls(acknowledges=False)
            finally:
                member.close()
            assert bool(of_the_trace(functions)) == is_traced
    assert fewest[True] <= fewest[False] + CALLS_PER_DELIVERY_MAX * CountedMember.requests
