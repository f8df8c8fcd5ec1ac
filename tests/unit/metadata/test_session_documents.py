"""Session document of a broker: its listeners, as this version and version 0.1 read and write them."""

from __future__ import annotations

from typing import Any

import pytest

from mansio.metadata.model import (
    BrokerEndpoint,
    InterBrokerListener,
    decode_session,
    session_document,
)

INSIDE = BrokerEndpoint(2, "node-2.internal", 9092, "a")
OUTSIDE = BrokerEndpoint(2, "lb.example", 19092, "a")
OLD_DOCUMENT = {"host": "node-2", "port": 9092, "rack": "a", "run": "r"}


def written(**endpoints: BrokerEndpoint) -> dict[str, Any]:
    return session_document(endpoints, next(iter(endpoints)), "a")


def test_every_listener_is_read_as_it_was_written() -> None:
    document = written(INSIDE=INSIDE, OUTSIDE=OUTSIDE)
    broker = decode_session(2, document, 7, InterBrokerListener("INSIDE"))
    assert broker.endpoints == {"INSIDE": INSIDE, "OUTSIDE": OUTSIDE}
    assert broker[:5] == (2, "node-2.internal", 9092, "a", 7)


def test_version_0_1_finds_the_address_for_brokers_in_the_fields_that_it_knows() -> None:
    document = written(INSIDE=INSIDE, OUTSIDE=OUTSIDE)
    assert (document["host"], document["port"], document["rack"]) == ("node-2.internal", 9092, "a")


def test_a_broker_of_version_0_1_has_one_listener_that_for_brokers() -> None:
    broker = decode_session(2, OLD_DOCUMENT, 7, InterBrokerListener("INSIDE"))
    assert broker[:5] == (2, "node-2", 9092, "a", 7)
    assert broker.endpoints == {"INSIDE": BrokerEndpoint(2, "node-2", 9092, "a")}


def test_brokers_are_reached_through_the_readers_listener_also_if_they_prefer_another_one() -> None:
    document = written(NEW=OUTSIDE, OLD=INSIDE)
    assert decode_session(2, document, 7, InterBrokerListener("OLD"))[1:3] == ("node-2.internal", 9092)
    assert decode_session(2, document, 7, InterBrokerListener("NEW"))[1:3] == ("lb.example", 19092)


@pytest.mark.parametrize(
    ("protocol", "address"), [("PLAINTEXT", ("node-2.internal", 9092)), ("SSL", ("", -1))]
)
def test_without_the_readers_listener_only_one_with_the_same_protocol_is_used(
    protocol: str, address: tuple[str, int]
) -> None:
    """A broker that encrypts never falls back to a connection that is not encrypted."""
    broker = decode_session(2, written(RENAMED=INSIDE), 7, InterBrokerListener("INSIDE", protocol))
    assert broker[1:3] == address
    assert list(broker.endpoints) == ["RENAMED"], "clients of the reader's listener do not get its address"


def test_a_listener_of_the_same_name_with_another_protocol_is_not_used() -> None:
    document = written(INSIDE=INSIDE._replace(security_protocol="SSL"))
    assert decode_session(2, document, 7, InterBrokerListener("INSIDE"))[1:3] == ("", -1)
