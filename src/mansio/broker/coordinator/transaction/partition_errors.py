"""Errors of partitions in a response that names several transactions or producers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import error_for_code

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from mansio.errors import MansioError

PartitionOutcomes = list["MansioError | None"]
"""None or an error for each partition, in the order of the request."""


def partition_errors(
    codes: Mapping[tuple[Hashable, str, int], int],
    owner: Hashable,
    partitions: Sequence[tuple[str, int]],
    missing: Sequence[MansioError | None],
) -> PartitionOutcomes:
    """Return None or an error for each partition. `codes`: error codes by owner, topic and index; `missing`: errors of
    the partitions that the response lacks."""
    found = [codes.get((owner, *partition)) for partition in partitions]
    return [
        error if code is None else error_for_code(code) if code else None
        for code, error in zip(found, missing, strict=True)
    ]
