"""The features that have simulated histories of their own, by seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim import deduplication, delays, transactions

if TYPE_CHECKING:
    from sim.feature import Feature

FEATURES: Final = (delays.FEATURE, deduplication.FEATURE, transactions.FEATURE)
"""In the order of their seeds: the histories of each end where those of the next one begin."""


def feature_of(seed: int) -> Feature | None:
    """The only feature that a history is of; None for a history of groups and shares."""
    return next((one for one in reversed(FEATURES) if seed >= one.first_seed), None)
