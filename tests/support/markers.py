"""Waiting for the markers of transactions, which are written after the answer to a commit or an abort."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mansio
from support.waiting import wait_until

if TYPE_CHECKING:
    from mansio import blocking

DECIDED = ["PrepareCommit", "PrepareAbort"]


def wait_for_markers(bootstrap_servers: str) -> None:
    """Return when every transaction that has been decided has its markers in all of its partitions."""
    with mansio.blocking.connect(bootstrap_servers) as client:
        wait_for_markers_of(client)


def wait_for_markers_of(client: blocking.Client) -> None:
    """The same, through a client that is connected."""
    wait_until(lambda: not [*client.admin.transactions.list(states=DECIDED)])
