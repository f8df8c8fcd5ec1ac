"""A topic whose schemas are not checked has no cost of that: the calls that a broker makes per request are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench import frames

import mansio
from component.test_delay_costs import REQUESTS, SOURCE, CountedBroker, requests_for
from mansio.wire.batch.record_batch import build_batch
from support.schema_ids import FakeSchemaIds, framed, use_schema_ids

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def of_validation(functions: set[str]) -> set[str]:
    """Functions in modules of the check."""
    own = (name for name in functions if name.startswith(str(SOURCE)))
    return {name for name in own if "schema_" in name.removeprefix(str(SOURCE)).partition(":")[0]}


def test_a_topic_without_validation_takes_no_call_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = FakeSchemaIds()
    ids.register("checked-value", 7)
    use_schema_ids(monkeypatch, ids)
    found: dict[bool, dict[str, int]] = {False: {}, True: {}}
    for is_checked, fewest in found.items():
        with mansio.Broker(tmp_path / str(is_checked)) as broker:
            with mansio.blocking.connect(broker.address) as client:
                client.admin.create_topic("plain", partitions=1)
                if is_checked:
                    config = {"mansio.value.schema.validation": "true"}
                    client.admin.create_topic("checked", partitions=1, config=config)
                    client.publish("checked", framed(7))
            counted = CountedBroker(broker)
            try:
                for name, request in requests_for("plain").items():
                    fewest[name], functions = counted.calls_of(request)
                    assert not of_validation(functions), f"{name} calls {of_validation(functions)}"
                if is_checked:  # otherwise no call could be seen
                    batch = build_batch([(1_000, None, framed(7), ())])
                    _, functions = counted.calls_of(frames.produce_request("checked", 0, 1, batch))
                    assert of_validation(functions)
            finally:
                counted.close()
    assert found[True] == found[False]
    assert min(found[True].values()) > 10 * REQUESTS
