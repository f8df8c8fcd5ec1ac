"""Quota service without any wire protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from component.services.services_fixtures import run
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services.quotas import CLIENT_ID, IP, USER, MatchType, QuotaAlteration, QuotaFilter
from mansio.errors import InvalidRequest, UnsupportedVersion
from mansio.state.quota import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE, NonLiteralName, QuotaEntity

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices

SLOW = [(CLIENT_ID, "slow")]
DEFAULT = [(CLIENT_ID, None)]
ANONYMOUS_DEFAULT = [(USER, "ANONYMOUS"), (CLIENT_ID, None)]


def entities(services: BrokerServices, *filters: QuotaFilter, strict: bool = False) -> set[QuotaEntity]:
    return {quota.entity for quota in services.quotas.describe(filters, strict=strict, caller=ANONYMOUS)}


def test_quotas_are_set_described_enforced_and_removed(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        quotas = services.quotas
        before = quotas.active
        assert before is None
        errors = await quotas.alter_each(
            [
                QuotaAlteration(SLOW, [(PRODUCER_BYTE_RATE, 1000.0), (CONSUMER_BYTE_RATE, 2000.0)]),
                QuotaAlteration(DEFAULT, [(PRODUCER_BYTE_RATE, 1e9)]),
                QuotaAlteration(ANONYMOUS_DEFAULT, [(CONSUMER_BYTE_RATE, 5e9)]),
            ],
            caller=ANONYMOUS,
        )
        assert errors == [None] * 3
        slow, default = (
            QuotaEntity(NonLiteralName.ABSENT, "slow"),
            QuotaEntity(NonLiteralName.ABSENT, NonLiteralName.DEFAULT),
        )
        both = QuotaEntity("ANONYMOUS", NonLiteralName.DEFAULT)
        assert entities(services) == {slow, default, both}
        assert entities(services, QuotaFilter(CLIENT_ID, MatchType.EXACT, "slow")) == {slow}
        assert entities(services, QuotaFilter(CLIENT_ID, MatchType.DEFAULT)) == {default, both}
        assert entities(services, QuotaFilter(CLIENT_ID, MatchType.DEFAULT), strict=True) == {default}
        assert entities(services, QuotaFilter(USER, MatchType.ANY)) == {both}
        assert entities(services, QuotaFilter(IP, MatchType.ANY)) == set()
        active = quotas.active
        assert active is not None
        assert active.record_produce("ANONYMOUS", "slow", 1_000_000) > 0
        assert active.record_produce("ANONYMOUS", "other", 1000) == 0
        removals = [
            QuotaAlteration(SLOW, [(PRODUCER_BYTE_RATE, None), (CONSUMER_BYTE_RATE, None)]),
            QuotaAlteration(DEFAULT, [(PRODUCER_BYTE_RATE, None)]),
            QuotaAlteration(ANONYMOUS_DEFAULT, [(CONSUMER_BYTE_RATE, None)]),
        ]
        assert await quotas.alter_each(removals, caller=ANONYMOUS) == [None] * 3
        assert quotas.list_quotas() == []
        assert quotas.active is None

    run(tmp_path, work)


def test_each_alteration_fails_on_its_own_and_validation_changes_nothing(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        rate = [(PRODUCER_BYTE_RATE, 1000.0)]
        alterations = [
            QuotaAlteration(SLOW, rate),
            QuotaAlteration(SLOW, rate),
            QuotaAlteration([(IP, "10.0.0.1")], rate),
            QuotaAlteration([("group", "g")], rate),
            QuotaAlteration([], rate),
            QuotaAlteration([(CLIENT_ID, "a"), (CLIENT_ID, "b")], rate),
            QuotaAlteration([(USER, "")], rate),
            QuotaAlteration([(CLIENT_ID, "x")], [("request_percentage", 1.0)]),
            QuotaAlteration([(CLIENT_ID, "y")], rate * 2),
        ]
        errors = await services.quotas.alter_each(alterations, caller=ANONYMOUS)
        assert all(isinstance(error, InvalidRequest) for error in errors)
        valid = [QuotaAlteration([(CLIENT_ID, "valid")], rate)]
        assert await services.quotas.alter_each(valid, validate_only=True, caller=ANONYMOUS) == [None]
        assert services.quotas.list_quotas() == []

    run(tmp_path, work)


@pytest.mark.parametrize(
    ("filters", "error"),
    [
        ([QuotaFilter("", MatchType.ANY)], InvalidRequest),
        ([QuotaFilter("group", MatchType.ANY)], UnsupportedVersion),
        ([QuotaFilter(USER, MatchType.ANY)] * 2, InvalidRequest),
        ([QuotaFilter(IP, MatchType.ANY), QuotaFilter(USER, MatchType.ANY)], InvalidRequest),
        ([QuotaFilter(USER, 9)], InvalidRequest),
        ([QuotaFilter(USER, MatchType.EXACT)], InvalidRequest),
    ],
)
def test_an_invalid_filter_is_rejected(
    tmp_path: Path, filters: list[QuotaFilter], error: type[Exception]
) -> None:
    async def work(services: BrokerServices) -> None:
        with pytest.raises(error):
            services.quotas.describe(filters, caller=ANONYMOUS)

    run(tmp_path, work)
