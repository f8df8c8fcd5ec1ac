"""Limit of the items that one administrative request may create, change or delete.

Each item is a durable change of its own, so that a request with very many of them would occupy the metadata store for
minutes. A request above the limit is refused before its first item.
"""

from __future__ import annotations

from typing import Final

from mansio.errors import PolicyViolation

ITEMS_MAX: Final = 1_000
"""Maximum number of topics, groups, resources or entities of a request that changes them."""


def too_many_items(count: int) -> PolicyViolation | None:
    """Return the error of each item of a request with `count` items; None if it has no more than `ITEMS_MAX`."""
    if count <= ITEMS_MAX:
        return None
    return PolicyViolation(f"{count} items in one request, which may have {ITEMS_MAX}; nothing was changed")
