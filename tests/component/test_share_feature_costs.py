"""A share group without order by key, priorities and deduplication has no cost of them: the calls that a broker
makes per request are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bench.share_frames import ShareFetches, acquired

import mansio
from component.test_delay_costs import SOURCE, CountedBroker
from mansio.wire.apis import share_acknowledge
from mansio.wire.apis.share_acknowledge import AckBatch, AckPartition
from support.tiers import smoke_first

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.testing import TestBroker

RECORDS = 400
MODULES = ("key_index", "key_limits", "dedup", "priorit")
WARM_UP = 3
"""Requests that create the group's state, before the others are counted."""


class CountedMember(CountedBroker):
    """A member of a share group of topic `plain`, which takes and accepts one record with each request."""

    requests = 5
    rounds = 40

    def __init__(self, broker: mansio.Broker | TestBroker, group: str, topic_id: bytes) -> None:
        super().__init__(broker)
        self._fetches = ShareFetches(group, "member", topic_id)
        self._topic_id = topic_id
        self._group = group
        self._leased: list[tuple[int, int]] = []
        self._acknowledges = False

    def calls(self, *, acknowledges: bool) -> tuple[int, set[str]]:
        """As `calls_of`. `acknowledges`: by requests of their own."""
        self._acknowledges = acknowledges
        for _ in range(WARM_UP):
            self._ask(b"")
        return self.calls_of(b"")

    def close(self) -> None:
        """Accept what was taken, so that the end of the connection changes nothing."""
        self._socket.sendall(self._fetches.request(0, self._leased))
        self._answer()
        super().close()

    def _ask(self, request: bytes) -> None:
        if self._acknowledges and self._leased:
            first, last = self._leased[0]
            batches = [AckPartition(0, [AckBatch(first, last, b"\x01")])]
            epoch, self._fetches.epoch = self._fetches.epoch, self._fetches.epoch + 1
            self._socket.sendall(
                share_acknowledge.encode_request(
                    2, 1, "bench", self._group, "member", epoch, [(self._topic_id, batches)]
                )
            )
            self._answer()
            self._leased = []
        self._socket.sendall(self._fetches.request(1, self._leased))
        answer = self._answer()
        self._leased = acquired(memoryview(answer))

    def _answer(self) -> bytes:
        size = self._receive(4)
        return size + self._receive(int.from_bytes(size, "big"))


def member_of(broker: mansio.Broker, order: str) -> CountedMember:
    with mansio.blocking.connect(broker.address) as client:
        group = f"by-{order}"
        client.admin.alter_group_config(
            group, {"share.auto.offset.reset": "earliest", "mansio.share.order": order}
        )
        topic_id = client.admin.describe_topic("plain").topic_id
    return CountedMember(broker, group, topic_id)


def of_features(functions: set[str]) -> set[str]:
    """Functions in modules of the features."""
    return {
        name
        for name in functions
        if name.startswith(str(SOURCE)) and any(word in name.partition(":")[0] for word in MODULES)
    }


@pytest.mark.row("D8", "D2")
@pytest.mark.parametrize("acknowledges", smoke_first(True, False), ids=["share acknowledge", "share fetch"])
def test_a_share_group_without_the_settings_takes_no_call_more(tmp_path: Path, acknowledges: bool) -> None:
    fewest: dict[bool, int] = {}
    for others in (False, True):
        with mansio.Broker(tmp_path / str(others)) as broker:
            with mansio.blocking.connect(broker.address) as client:
                client.admin.create_topic("plain", partitions=1)
                client.publish_many("plain", [b"record"] * RECORDS)
                if others:
                    client.admin.create_topic("window", partitions=1, config={"mansio.dedup.ms": "3600000"})
            if others:
                keyed = member_of(broker, "key")
                try:
                    _, functions = keyed.calls(acknowledges=acknowledges)
                finally:
                    keyed.close()
                assert of_features(functions), "no call could be seen"
            plain = member_of(broker, "none")
            try:
                fewest[others], functions = plain.calls(acknowledges=acknowledges)
            finally:
                plain.close()
            assert not of_features(functions), of_features(functions)
    assert abs(fewest[True] - fewest[False]) < CountedMember.requests  # not one call more per request
    assert fewest[True] > 100
