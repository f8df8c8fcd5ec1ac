"""A search over many partitions: an error of one is reported after the others, and holds nothing up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mansio.client.admin.record_search import RecordSearch, search_records
from mansio.errors import LeaderNotAvailable
from support.machine import scaled

PARTITIONS = 20


class WithoutLeaders:
    """A cluster whose partitions have no leader."""

    async def topic(self, name: str, *, may_create: bool) -> Any:
        return SimpleNamespace(partitions=[SimpleNamespace(leader=-1)] * PARTITIONS)

    async def retry(self, attempt: Any, *, not_retried: Any) -> Any:
        raise LeaderNotAvailable("no leader")


def test_a_search_in_partitions_without_leader_ends_with_that_error() -> None:
    search = RecordSearch.of(
        "orders",
        key=None,
        record_id="some id",
        partition=None,
        since_ms=None,
        until_ms=None,
        limit=None,
        timeout_ms=scaled(30) * 1000,
    )

    async def run() -> None:
        cluster: Any = WithoutLeaders()
        async with asyncio.timeout(scaled(20)):
            async for _ in search_records(cluster, search):
                pytest.fail("something was found")

    with pytest.raises(LeaderNotAvailable):
        asyncio.run(run())


def test_an_id_is_found_in_whatever_case_it_is_written() -> None:
    written = "01a22edd-9f76-7629-a681-8020797c351b"
    search = RecordSearch.of(
        "orders",
        key=None,
        record_id=written.upper(),
        partition=None,
        since_ms=None,
        until_ms=None,
        limit=None,
        timeout_ms=1_000,
    )
    assert search.record_id == written
