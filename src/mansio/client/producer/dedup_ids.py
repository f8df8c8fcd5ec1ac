"""Publishing with a deduplication id: the header of a record, and its partition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from mansio.client.producer.topic_setting_check import TopicSettingCheck
from mansio.errors import DeduplicationNotEnabled
from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER, ID_BYTES_MAX

if TYPE_CHECKING:
    from mansio.client.types import HeadersLike
    from mansio.net.cluster import Cluster

_SETTING: Final = "mansio.dedup.ms"


def deduplication_check(cluster: Cluster) -> TopicSettingCheck:
    """Return what knows which topics have a deduplication window; its error is `DeduplicationNotEnabled`."""
    return TopicSettingCheck(cluster, _SETTING, "0", _new_error)


def _new_error(topic: str) -> DeduplicationNotEnabled:
    return DeduplicationNotEnabled(
        f"topic '{topic}' has no deduplication window: mansio topic alter {topic} -c {_SETTING}=300000"
    )


def encode_dedup_id(dedup_id: bytes | str) -> bytes:
    """Return an id as bytes. Raises `ValueError`."""
    found = dedup_id.encode() if isinstance(dedup_id, str) else dedup_id
    if not isinstance(found, bytes) or not 1 <= len(found) <= ID_BYTES_MAX:
        raise ValueError(f"dedup_id: not 1 to {ID_BYTES_MAX} bytes: {dedup_id!r}")
    return found


def with_dedup_header(headers: HeadersLike | None, dedup_id: bytes) -> list[tuple[str, bytes | str | None]]:
    """Return the headers with the header of the id. Raises `ValueError` if it is there already."""
    if headers is None:
        pairs: list[tuple[str, bytes | str | None]] = []
    else:
        pairs = [*(headers.items() if isinstance(headers, Mapping) else headers)]
    if any(pair[0] == DEDUP_ID_HEADER for pair in pairs):
        raise ValueError(f"give the id as an argument or as the header {DEDUP_ID_HEADER}, not both")
    return [*pairs, (DEDUP_ID_HEADER, dedup_id)]
