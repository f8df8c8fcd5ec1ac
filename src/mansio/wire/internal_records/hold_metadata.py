"""Retention hold in the metadata of a committed offset: the mark with which a pipeline delays deletion.

A named pipeline is a consumer group without members, `mansio.pipeline.<name>`. Its committed offsets have a mark in
their metadata, and the broker retains records at or above a marked offset (`broker/partition/retention_holds.py`). The
mark is encoded and decoded here for both sides.

Invariant: only the group prefix *and* the mark together are a hold. A group of that name without a mark, or with a mark
that this version cannot decode, is an ordinary group.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

PIPELINE_GROUP_PREFIX: Final = "mansio.pipeline."
"""Prefix of the group id of every pipeline, followed by the pipeline's name."""

QUERY_CHARACTERS_MAX: Final = 256
"""Limit on the stored query id, which is informational; offset metadata is bounded (4,096 bytes)."""

_VERSION: Final = 1
_METADATA_CHARACTERS_MAX: Final = 4_096


class Hold(NamedTuple):
    """Mark of one committed offset. `query`: Spark's id of the query that committed it; may be empty."""

    query: str


def pipeline_group(name: str) -> str:
    """The group id of a pipeline."""
    return PIPELINE_GROUP_PREFIX + name


def pipeline_of(group_id: str) -> str | None:
    """The pipeline name of a group id; None for any other group."""
    name = group_id.removeprefix(PIPELINE_GROUP_PREFIX)
    return name if name and name != group_id else None


def encode_hold_metadata(query: str) -> str:
    """The mark as metadata of a committed offset, in ASCII for any query id."""
    return json.dumps({"hold": _VERSION, "query": query[:QUERY_CHARACTERS_MAX]}, separators=(",", ":"))


def parse_hold_metadata(metadata: str) -> Hold | None:
    """The mark in the metadata of a committed offset; None for any other metadata.

    A trailing zero byte is ignored: some clients written in C send their string terminator.
    """
    metadata = metadata.rstrip("\0")
    if not metadata.startswith("{") or len(metadata) > _METADATA_CHARACTERS_MAX:
        return None
    try:
        found = json.loads(metadata)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or type(found.get("hold")) is not int or found["hold"] != _VERSION:
        return None
    query = found.get("query", "")
    return Hold(query) if isinstance(query, str) else None
