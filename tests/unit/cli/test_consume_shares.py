"""When `mansio consume --share-group --exit-at-end` ends: only when nothing can be had, and nothing is on its way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mansio.cli.records.consume_shares import Disposition, ShareConsumeCommand
from mansio.client.admin.shares import LeaseHolder, ShareLeases

OURS = "me"
AT_THE_END = ShareLeases(0, 10, 6, 3, 1, 1, 1, 4, "", (LeaseHolder("other", 3, 5),), ())
"""Six records are open: three leased by another, one resting, one withheld, one on its way to the dead letters."""


def is_at_end(held: int, *leases: ShareLeases | None) -> bool:
    async def describe_topic(_: str) -> Any:
        return SimpleNamespace(partitions=[SimpleNamespace(index=at) for at in range(len(leases))])

    async def shares(_: str, partitions: list[Any]) -> dict[Any, ShareLeases | None]:
        return dict(zip(partitions, leases, strict=True))

    client: Any = SimpleNamespace(
        admin=SimpleNamespace(describe_topic=describe_topic, shares=SimpleNamespace(leases=shares))
    )
    receiver: Any = SimpleNamespace(member_id=OURS, held_count=held)
    return asyncio.run(
        ShareConsumeCommand("t", "g", Disposition.ACK, True, None)._is_at_end(client, receiver)
    )


def test_it_ends_when_all_that_is_open_is_in_other_hands_or_rests() -> None:
    assert is_at_end(0, AT_THE_END, AT_THE_END)


@pytest.mark.parametrize(
    ("held", "other"),
    [
        (0, None),
        (0, ShareLeases(0, 10, 7, 3, 1, 1, 1, 4, "", (), ())),
        (0, ShareLeases(0, 10, 6, 3, 1, 1, 1, 4, "", (LeaseHolder(OURS, 3, 5),), ())),
        (1, AT_THE_END),
    ],
    ids=[
        "a partition nobody has begun to read",
        "a record that is free",
        "leases on their way to us",
        "one in our hands",
    ],
)
def test_it_goes_on_while_there_is(held: int, other: ShareLeases | None) -> None:
    assert not is_at_end(held, AT_THE_END, other)
