"""Trend of a series of samples, robust against single outliers."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

POINTS_MAX = 400
"""Pairs are compared, so this many points are 80,000 slopes."""


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Theil and Sen: the median of the slopes between all pairs of points. Up to 29 % of them may be far off."""
    points = list(zip(times, values, strict=True))
    points = points[:: -(-len(points) // POINTS_MAX)]
    return statistics.median(
        (later - earlier) / (end - begin)
        for (begin, earlier), (end, later) in itertools.combinations(points, 2)
        if end > begin
    )


def after_warm_up(samples: Sequence[T]) -> Sequence[T]:
    """Without the first third: schemas are imported, caches fill, the allocator finds its size."""
    return samples[len(samples) // 3 :]
