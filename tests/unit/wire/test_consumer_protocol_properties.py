"""Embedded consumer protocol compared with kio's schemas in every version, and with garbage."""

from __future__ import annotations

import importlib
from contextlib import suppress
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.serial import entity_reader, entity_writer

from mansio.client.types import TopicPartition
from mansio.errors import WireError
from mansio.wire.internal_records.consumer_protocol import (
    Assignment,
    Subscription,
    decode_assignment,
    decode_subscribed_topics,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
partitions = st.lists(
    st.builds(TopicPartition, names, st.integers(0, 2**31 - 1)), unique=True, max_size=8
).map(lambda found: tuple(sorted(found)))
subscriptions = st.builds(
    Subscription,
    topics=st.lists(names, max_size=5).map(tuple),
    owned_partitions=partitions,
    generation_id=st.integers(-1, 2**31 - 1),
    user_data=st.none() | st.binary(max_size=30),
    rack_id=st.none() | names,
)


def entity(kind: str, version: int) -> Any:
    module = importlib.import_module(f"kio.schema.consumer_protocol_{kind}.v{version}.data")
    return getattr(module, f"ConsumerProtocol{kind.title()}")


def read(kind: str, version: int, data: bytes) -> Any:
    found, end = entity_reader(entity(kind, version))(data, 0)
    assert end == len(data)
    return found


@given(subscriptions, st.integers(0, 3))
def test_kio_decodes_our_subscription(subscription: Subscription, version: int) -> None:
    reported = Subscription(
        subscription.topics,
        subscription.owned_partitions,
        subscription.generation_id,
        subscription.user_data,
        subscription.rack_id,
        version,
    )
    data = encode_subscription(reported)
    found = read("subscription", version, data[2:])
    assert tuple(found.topics) == reported.topics
    assert found.user_data == reported.user_data
    if version >= 1:
        owned = {(entry.topic, index) for entry in found.owned_partitions for index in entry.partitions}
        assert owned == set(reported.owned_partitions)
    if version >= 2:
        assert found.generation_id == reported.generation_id
    if version >= 3:
        assert found.rack_id == reported.rack_id


@given(subscriptions)
def test_subscription_round_trip(subscription: Subscription) -> None:
    assert decode_subscription(encode_subscription(subscription)) == subscription
    assert decode_subscribed_topics(encode_subscription(subscription)) == subscription.topics


@given(partitions, st.none() | st.binary(max_size=20))
def test_assignment_round_trip_agrees_with_kio(given_partitions: Any, user_data: bytes | None) -> None:
    assignment = Assignment(given_partitions, user_data)
    data = encode_assignment(assignment)
    assert set(decode_assignment(data).partitions) == set(given_partitions)
    found = read("assignment", 3, data[2:])
    assert {(e.topic, i) for e in found.assigned_partitions for i in e.partitions} == set(given_partitions)
    buffer = BytesIO()
    entity_writer(entity("assignment", 3))(buffer, found)
    assert decode_assignment(b"\x00\x03" + buffer.getvalue()) == decode_assignment(data)


@given(subscriptions, st.binary(max_size=10))
def test_newer_version_is_decoded_as_the_newest_known_one(subscription: Subscription, more: bytes) -> None:
    newer = b"\x00\x09" + encode_subscription(subscription)[2:] + more
    assert decode_subscription(newer) == subscription


@given(subscriptions, st.integers(0, 200), st.integers(0, 255))
def test_damaged_subscription_is_a_wire_error_or_another_one(
    s: Subscription, position: int, byte: int
) -> None:
    data = bytearray(encode_subscription(s))
    data[position % len(data)] = byte
    with suppress(WireError):
        decode_subscription(bytes(data))


@given(st.binary(max_size=60))
def test_garbage_is_a_wire_error(data: bytes) -> None:
    for decode in (decode_subscription, decode_subscribed_topics, decode_assignment):
        with suppress(WireError):
            decode(data)


def test_count_larger_than_the_bytes_is_refused_immediately() -> None:
    with pytest.raises(WireError, match="announces"):
        decode_subscription(b"\x00\x01\x7f\xff\xff\xff")
