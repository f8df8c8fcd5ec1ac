"""Lease service: receipts, and a result for each acknowledged record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from component.services.services_fixtures import run
from component.services.test_receive_records import prepare, publish
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services.share_groups.leases import ACKNOWLEDGEMENTS_MAX, Acknowledgement, Receipt
from mansio.errors import InvalidGroupId, InvalidReceipt, InvalidRecordState, InvalidRequest
from mansio.state.share_partition.types import ACCEPT, LEASE_MS_MAX, REJECT, RELEASE, RENEW

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices


async def receive(services: BrokerServices, max_records: int = 100, lease_ms: int = -1) -> dict[bytes, str]:
    """Receipts by value, and their delivery counts."""
    result = await services.leases.receive(
        "g", ["t"], max_records=max_records, max_wait_ms=2000, lease_ms=lease_ms, caller=ANONYMOUS
    )
    return {one.value or b"": services.leases.receipt_of(result, one) for one in result.records}


async def receive_all(services: BrokerServices, count: int, lease_ms: int = -1) -> dict[bytes, str]:
    receipts: dict[bytes, str] = {}
    while len(receipts) < count:
        receipts |= await receive(services, lease_ms=lease_ms)
    return receipts


@given(
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
    st.integers(0, (1 << 31) - 1),
    st.integers(0, (1 << 63) - 1),
    st.integers(1, (1 << 31) - 1),
)
def test_a_receipt_is_decoded_as_it_was_encoded(
    member: bytes, topic_id: bytes, partition: int, offset: int, delivery_count: int
) -> None:
    receipt = Receipt(member.hex(), topic_id, partition, offset, delivery_count)
    assert Receipt.decode(receipt.encode()) == receipt


@given(st.text(max_size=80) | st.text("ab-_+/=", min_size=64, max_size=64))
def test_a_text_that_is_no_receipt_is_refused(text: str) -> None:
    try:
        receipt = Receipt.decode(text)
    except InvalidReceipt:
        return
    assert receipt.encode() == text


def test_each_acknowledgement_has_its_own_result(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await prepare(services)
        values = [b"v%d" % number for number in range(10)]
        await publish(services, *values)
        receipts = await receive_all(services, len(values))
        assert await services.leases.acknowledge(
            "g", [Acknowledgement(receipts[b"v2"], ACCEPT)], caller=ANONYMOUS
        ) == [None]
        forged = Receipt.decode(receipts[b"v4"])._replace(member_id="00" * 16).encode()
        results = await services.leases.acknowledge(
            "g",
            [
                Acknowledgement(receipts[b"v9"], ACCEPT),
                Acknowledgement("no receipt", ACCEPT),
                Acknowledgement(receipts[b"v2"], ACCEPT),  # accepted already
                Acknowledgement(receipts[b"v0"], ACCEPT),
                Acknowledgement(forged, ACCEPT),
                Acknowledgement(receipts[b"v1"], RELEASE, 0),
                Acknowledgement(receipts[b"v3"], 9),
                Acknowledgement(receipts[b"v3"], RENEW, LEASE_MS_MAX + 1),
                Acknowledgement(receipts[b"v5"], RENEW, 60_000),
                Acknowledgement(receipts[b"v6"], REJECT, reason="broken"),
            ],
            caller=ANONYMOUS,
        )
        kinds = [type(each) for each in results]
        none = type(None)
        assert kinds == [
            none,
            InvalidReceipt,
            InvalidRecordState,
            none,
            InvalidRecordState,
            none,
            InvalidRequest,
            InvalidRequest,
            none,
            none,
        ]
        again = await receive(services)
        assert list(again) == [b"v1"]
        assert Receipt.decode(again[b"v1"]).delivery_count == 2
        rest = [receipts[value] for value in (b"v3", b"v4", b"v5", b"v7", b"v8")]
        assert (
            await services.leases.acknowledge(
                "g", [Acknowledgement(one, ACCEPT) for one in rest], caller=ANONYMOUS
            )
            == [None] * 5
        )

    run(tmp_path, work)


def test_a_receipt_given_twice_in_one_call_acknowledges_the_record_once(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await prepare(services)
        await publish(services, b"v")
        receipts = await receive(services)
        twice = [Acknowledgement(receipts[b"v"], ACCEPT)] * 2
        first, second = await services.leases.acknowledge("g", twice, caller=ANONYMOUS)
        assert {type(first), type(second)} == {type(None), InvalidRecordState}

    run(tmp_path, work)


def test_a_receipt_of_another_group_or_an_ended_lease_is_refused(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await prepare(services)
        await publish(services, b"v")
        ended = await receive(services, lease_ms=0)
        (error,) = await services.leases.acknowledge(
            "other", [Acknowledgement(ended[b"v"], ACCEPT)], caller=ANONYMOUS
        )
        assert isinstance(error, InvalidRecordState)
        again = await receive(services)
        assert again[b"v"] != ended[b"v"]
        (error,) = await services.leases.acknowledge(
            "g", [Acknowledgement(ended[b"v"], ACCEPT)], caller=ANONYMOUS
        )
        assert isinstance(error, InvalidRecordState)
        assert await services.leases.acknowledge(
            "g", [Acknowledgement(again[b"v"], ACCEPT)], caller=ANONYMOUS
        ) == [None]

    run(tmp_path, work)


def test_calls_are_bounded(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        with pytest.raises(InvalidRequest, match="at most"):
            await services.leases.acknowledge(
                "g", [Acknowledgement("", ACCEPT)] * (ACKNOWLEDGEMENTS_MAX + 1), caller=ANONYMOUS
            )
        with pytest.raises(InvalidRequest, match="12 hours"):
            await services.leases.receive(
                "g", ["t"], max_records=1, max_wait_ms=0, lease_ms=LEASE_MS_MAX + 1, caller=ANONYMOUS
            )
        receipt = Receipt("00" * 16, b"\0" * 16, 0, 0, 1).encode()
        with pytest.raises(InvalidGroupId):
            await services.leases.acknowledge("", [Acknowledgement(receipt, ACCEPT)], caller=ANONYMOUS)
        assert await services.leases.acknowledge("g", [], caller=ANONYMOUS) == []

    run(tmp_path, work)
