"""Quotas in the metadata store: what concurrent changes, missed changes and other versions do to those in force."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import mansio.broker.services.quotas
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.quotas import Quota, QuotaService
from mansio.errors import InvalidRequest, PolicyViolation
from mansio.host.clock import HostClock, HostRandom
from mansio.metadata import metadata_store
from mansio.metadata.image import MetadataImage
from mansio.metadata.metadata_store import Put
from mansio.state.quota import NonLiteralName, QuotaEntity
from support.machine import scaled
from support.metadata import DEADLINE_SECONDS, Admin, sqlite_store, topic_admin

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CLIENT = QuotaEntity(client_id="c")


def quotas_of(admin: Admin, state: MetadataImage) -> QuotaService:
    return QuotaService(
        store=admin.store,
        state=state,
        scheduler=admin.scheduler,
        random=HostRandom(),
        clock=HostClock(),
        burst_ms=1000,
        authorization=Authorization(None),
    )


def run(check: Callable[[Admin, QuotaService], Awaitable[None]]) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(scaled(DEADLINE_SECONDS)),
            sqlite_store() as store,
            topic_admin(store) as admin,
        ):
            await check(admin, quotas_of(admin, admin.state))

    asyncio.run(main())


def test_changes_at_the_same_time_are_all_kept() -> None:
    async def check(admin: Admin, quotas: QuotaService) -> None:
        del admin
        await asyncio.gather(
            quotas.alter(CLIENT, {"producer_byte_rate": 1}),
            quotas.alter(CLIENT, {"consumer_byte_rate": 2}),
            quotas.alter(QuotaEntity(client_id=NonLiteralName.DEFAULT), {"consumer_byte_rate": 3}),
        )
        assert Quota(CLIENT, {"producer_byte_rate": 1, "consumer_byte_rate": 2}) in quotas.list_quotas()
        assert len(quotas.list_quotas()) == 2
        await asyncio.gather(
            quotas.alter(CLIENT, {"producer_byte_rate": None}),
            quotas.alter(CLIENT, {"consumer_byte_rate": None}),
        )
        assert [quota.entity for quota in quotas.list_quotas()] == [
            QuotaEntity(client_id=NonLiteralName.DEFAULT)
        ]

    run(check)


def test_a_view_that_missed_changes_has_the_right_quotas_in_force_afterwards() -> None:
    async def check(admin: Admin, quotas: QuotaService) -> None:
        await quotas.alter(CLIENT, {"producer_byte_rate": 1})
        late = await MetadataImage.load(admin.store, "", HostRandom())
        view = quotas_of(admin, late)
        assert view.active is not None
        await quotas.alter(CLIENT, {"producer_byte_rate": None})
        late._apply_listing(await admin.store.list(late.keys.prefix))
        assert view.list_quotas() == []
        assert view.active is None

    run(check)


def test_a_quota_kept_by_another_version_is_shown_and_can_be_removed_but_has_no_effect() -> None:
    async def check(admin: Admin, quotas: QuotaService) -> None:
        document = {"entity": {"user": "alice"}, "values": {"request_percentage": 5.0}}
        key = f"{admin.state.keys.quotas}user=alice"
        done = await admin.store.transact([], [Put(key, metadata_store.encode(document, "w"))])
        await admin.state.wait_for_revision(done.revision, admin.scheduler)
        assert quotas.list_quotas() == [Quota(QuotaEntity(user="alice"), {"request_percentage": 5.0})]
        assert quotas.active is None
        with pytest.raises(InvalidRequest):
            await quotas.alter(QuotaEntity(user="alice"), {"request_percentage": 6})
        await quotas.alter(QuotaEntity(user="alice"), {"request_percentage": None})
        assert quotas.list_quotas() == []

    run(check)


def test_the_number_of_entities_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mansio.broker.services.quotas, "ENTITIES_MAX", 2)

    async def check(admin: Admin, quotas: QuotaService) -> None:
        del admin
        for name in "ab":
            await quotas.alter(QuotaEntity(client_id=name), {"producer_byte_rate": 1})
        with pytest.raises(PolicyViolation):
            await quotas.alter(CLIENT, {"producer_byte_rate": 1})
        await quotas.alter(QuotaEntity(client_id="a"), {"producer_byte_rate": 2})
        await quotas.alter(QuotaEntity(client_id="a"), {"producer_byte_rate": None})
        await quotas.alter(CLIENT, {"producer_byte_rate": 1})

    run(check)
