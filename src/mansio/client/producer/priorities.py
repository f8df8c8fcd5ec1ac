"""Publishing with a priority: the header of a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from mansio.client.producer.topic_setting_check import TopicSettingCheck
from mansio.errors import PrioritiesNotEnabled
from mansio.wire.batch.priority_header import PRIORITY_HEADER, PRIORITY_NAMES

if TYPE_CHECKING:
    from mansio.client.types import HeadersLike
    from mansio.net.cluster import Cluster

_SETTING: Final = "mansio.priority.enable"

NORMAL: Final = "normal"


def priority_check(cluster: Cluster) -> TopicSettingCheck:
    """Return what knows which topics have priorities; its error is `PrioritiesNotEnabled`."""
    return TopicSettingCheck(cluster, _SETTING, "false", _new_error)


def _new_error(topic: str) -> PrioritiesNotEnabled:
    return PrioritiesNotEnabled(
        f"topic '{topic}' has no priorities: mansio topic alter {topic} -c {_SETTING}=true"
    )


def with_priority_header(headers: HeadersLike | None, priority: str) -> list[tuple[str, bytes | str | None]]:
    """Return the headers with the one of the priority, last. Raises `ValueError` if it is there already, or for another
    priority than high, normal and low."""
    if priority not in PRIORITY_NAMES:
        raise ValueError(f"priority: not high, normal or low: {priority!r}")
    if headers is None:
        pairs: list[tuple[str, bytes | str | None]] = []
    else:
        pairs = [*(headers.items() if isinstance(headers, Mapping) else headers)]
    if any(pair[0] == PRIORITY_HEADER for pair in pairs):
        raise ValueError(f"give the priority as an argument or as the header {PRIORITY_HEADER}, not both")
    return [*pairs, (PRIORITY_HEADER, priority)]
