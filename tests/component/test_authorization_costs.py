"""An authorizer costs the requests of records nothing in steady state: the calls that a broker makes per request are
counted."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from bench import frames

from component.test_delay_costs import REQUESTS, SOURCE, CountedBroker, requests_for
from component.test_share_feature_costs import RECORDS, CountedMember
from mansio.testing import TestBroker
from mansio.wire.apis import produce
from support.record_rights import RecordRights
from support.tiers import smoke_first

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("records", "share fetch", "share acknowledge")


def topics_of(broker: TestBroker) -> bytes:
    """Create the topics; return the id of the first one."""
    client = broker.client()
    for topic in ("plain", "other"):
        client.admin.create_topic(topic, partitions=1)
    client.publish_many("plain", [b"record"] * RECORDS)
    client.admin.alter_group_config("group", {"share.auto.offset.reset": "earliest"})
    return bytes(client.admin.describe_topic("plain").topic_id)


def calls_of(broker: TestBroker, kind: str) -> Iterator[tuple[int, set[str]]]:
    """Yield the fewest calls of each kind of request, and the functions."""
    topic_id = topics_of(broker)
    if kind == "records":
        batch = frames.batch(1, 100)
        both = [(name, None, [(0, batch)]) for name in ("plain", "other")]
        requests = {
            **requests_for("plain"),
            "produce to two topics": b"".join(produce.encode_request(9, 1, "bench", 1, 30_000, both)),
        }
        with closing(CountedBroker(broker)) as one:
            for request in requests.values():
                yield one.calls_of(request)
    else:
        with closing(CountedMember(broker, "group", topic_id)) as member:
            yield member.calls(acknowledges=kind == "share acknowledge")


@pytest.mark.row("A8")
@pytest.mark.parametrize("kind", smoke_first(*KINDS))
def test_with_an_authorizer_no_request_of_records_takes_a_call_more(kind: str) -> None:
    fewest: dict[bool, list[int]] = {}
    for is_enabled in (False, True):
        with TestBroker(**({"authorizer": "acl"} if is_enabled else {})) as broker:
            if is_enabled:
                RecordRights(broker).allow_everything()
            found = list(calls_of(broker, kind))
        fewest[is_enabled] = [calls for calls, _ in found]
        for _, functions in found:
            assert not {each for each in functions if "authoriz" in each.removeprefix(str(SOURCE))}
    if kind == "records":
        assert fewest[True] == fewest[False]
    else:  # timers of the group may fall into a round
        (enabled,), (absent,) = fewest[True], fewest[False]
        assert abs(enabled - absent) < CountedMember.requests
    assert min(fewest[True]) > 10 * REQUESTS
