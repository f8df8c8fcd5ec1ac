"""A topic without a deduplication window has no cost of it: the calls that a broker makes per request are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import mansio
from component.test_delay_costs import REQUESTS, SOURCE, CountedBroker, requests_for

if TYPE_CHECKING:
    from pathlib import Path


def of_deduplication(functions: set[str]) -> set[str]:
    """Functions in modules of deduplication."""
    own = (name for name in functions if name.startswith(str(SOURCE)))
    return {name for name in own if "dedup" in name.removeprefix(str(SOURCE)).partition(":")[0]}


@pytest.mark.row("P3")
def test_a_topic_without_a_window_takes_no_call_more(tmp_path: Path) -> None:
    found: dict[bool, dict[str, int]] = {False: {}, True: {}}
    for has_window, fewest in found.items():
        with mansio.Broker(tmp_path / str(has_window)) as broker:
            with mansio.blocking.connect(broker.address) as client:
                client.admin.create_topic("plain", partitions=1)
                if has_window:
                    client.admin.create_topic("unique", partitions=1, config={"mansio.dedup.ms": "600000"})
                    records = [mansio.OutgoingRecord(b"x", dedup_id=str(number)) for number in range(100)]
                    client.publish_many("unique", records)
            counted = CountedBroker(broker)
            try:
                for name, request in requests_for("plain").items():
                    fewest[name], functions = counted.calls_of(request)
                    assert not of_deduplication(functions), f"{name} calls {of_deduplication(functions)}"
                if has_window:  # otherwise no call could be seen
                    _, functions = counted.calls_of(requests_for("unique")["produce"])
                    assert of_deduplication(functions)
            finally:
                counted.close()
    assert found[True] == found[False]
    assert min(found[True].values()) > 10 * REQUESTS
