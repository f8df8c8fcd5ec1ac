"""Codec of retention holds, which pipelines store in the metadata of their committed offsets.

A named pipeline is a consumer group without members, `mansio.pipeline.<name>`. The metadata of its committed offsets
contains a retention hold, and the broker retains records at or above such an offset
(`broker/features/holds/retention_holds.py`).

Invariant: an offset holds records only if the group id has the prefix *and* the metadata contains a hold that this
version can decode. Other groups are ordinary groups.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

PIPELINE_GROUP_PREFIX: Final = "mansio.pipeline."
"""Prefix of the group id of every pipeline, followed by the pipeline's name."""

QUERY_CHARACTERS_MAX: Final = 256
"""Limit on the length of a stored query id, which is for information only; offset metadata has at most 4,096 bytes."""

_VERSION: Final = 1
_METADATA_CHARACTERS_MAX: Final = 4_096


class Hold(NamedTuple):
    """Retention hold of one committed offset. `query`: id of the Spark query that committed the offset; may be empty.
    `progress`: progress of the pipeline, in the form in which the pipeline stored it; None if the offset has none."""

    query: str
    progress: Mapping[str, Any] | None = None


def pipeline_group_id(name: str) -> str:
    """Return the group id of the pipeline `name`."""
    return PIPELINE_GROUP_PREFIX + name


def pipeline_name_of(group_id: str) -> str | None:
    """Return the name of the pipeline whose group id is `group_id`; None if it is no pipeline's."""
    name = group_id.removeprefix(PIPELINE_GROUP_PREFIX)
    return name if name and name != group_id else None


def encode_hold_metadata(query: str, progress: Mapping[str, Any] | None = None) -> str:
    """Encode a retention hold as metadata of a committed offset; the result is ASCII. `progress` is omitted if it is
    too long."""
    hold: dict[str, Any] = {"hold": _VERSION, "query": query[:QUERY_CHARACTERS_MAX]}
    text = json.dumps(
        hold if progress is None else hold | {"progress": dict(progress)}, separators=(",", ":")
    )
    return text if len(text) <= _METADATA_CHARACTERS_MAX else encode_hold_metadata(query)


def parse_hold_metadata(metadata: str) -> Hold | None:
    """Return the retention hold in the metadata of a committed offset; None if it contains none.

    Zero bytes at the end are ignored, because some clients written in C send the string terminator.
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
    query, progress = found.get("query", ""), found.get("progress")
    return Hold(query, progress if isinstance(progress, dict) else None) if isinstance(query, str) else None
