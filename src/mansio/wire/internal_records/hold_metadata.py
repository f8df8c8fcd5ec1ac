"""What says "keep these records for me": the committed offset of a pipeline that holds back deletion.

A named pipeline is a consumer group without members, `mansio.pipeline.<name>`. Its committed offsets carry a mark in
their metadata, and the broker keeps what lies at or above a marked offset
(`broker/partition/retention_holds.py`). Both sides read and
write the mark here.

Always true: only the prefix *and* the mark together hold anything back. A group of that name that some program commits
to without the mark is a group like any other, and so is one whose mark this version cannot read.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

PIPELINE_GROUP_PREFIX: Final = "mansio.pipeline."
"""What the group id of every pipeline begins with; the rest is the pipeline's name."""

QUERY_CHARACTERS_MAX: Final = 256
"""So much of a query's id is kept: it is for people, and metadata of an offset is bounded (4,096 bytes)."""

_VERSION: Final = 1
_METADATA_CHARACTERS_MAX: Final = 4_096


class Hold(NamedTuple):
    """The mark of one committed offset. `query`: who committed it, as Spark names the query; may be empty."""

    query: str


def pipeline_group(name: str) -> str:
    """The group id of a pipeline."""
    return PIPELINE_GROUP_PREFIX + name


def pipeline_of(group_id: str) -> str | None:
    """The name of the pipeline a group id stands for; None for any other group."""
    name = group_id.removeprefix(PIPELINE_GROUP_PREFIX)
    return name if name and name != group_id else None


def encode_hold_metadata(query: str) -> str:
    """The mark, as metadata of a committed offset. Plain ASCII, whatever the query is called."""
    return json.dumps({"hold": _VERSION, "query": query[:QUERY_CHARACTERS_MAX]}, separators=(",", ":"))


def parse_hold_metadata(metadata: str) -> Hold | None:
    """The mark in the metadata of a committed offset; None for metadata of any other kind, however odd.

    A zero byte at the end counts for nothing: some clients written in C send the one that ends their strings.
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
