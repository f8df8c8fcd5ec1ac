"""The topic a replay writes into: refused if it would not keep what comes.

Replayed records have their old timestamps, so a topic with an ordinary retention time would delete them minutes later,
one with a size would delete them, or what was in it, as they come, and one that stamps records itself would change
them. All of it is said before anything is written.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import InvalidRequest, PolicyViolation
from mansio.net.retry import raise_for
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.net.cluster import Cluster
    from mansio.net.metadata import TopicView
    from mansio.spark.sync_client import SyncClient

TOPIC_RESOURCE: Final = 2


def check_target(
    client: SyncClient, view: TopicView, partitions: Sequence[int], *, oldest_us: int | None
) -> None:
    """Whether records of these partitions, the oldest of them from `oldest_us`, stay in the topic as they are.

    Raises:
        InvalidRequest: It has too few partitions, or stamps records with its own clock.
        PolicyViolation: It would compact them, or delete them for their age or their size.
    """
    name = view.name
    if max(partitions) >= len(view.partitions):
        raise InvalidRequest(
            f"topic {name} has {len(view.partitions)} partitions, but partition {max(partitions)} is to be replayed: "
            "grow it (mansio topic alter --partitions), or replay into a new topic"
        )
    settings = client.run(_settings(client.cluster, name))
    if settings.get("message.timestamp.type") == "LogAppendTime":
        raise InvalidRequest(
            f"topic {name} stamps records with its own clock (message.timestamp.type): the replayed ones would lose "
            "their timestamps; replay into another topic"
        )
    if "compact" in (settings.get("cleanup.policy") or ""):
        raise PolicyViolation(
            f"topic {name} is compacted: replayed records would not stay; replay into another topic"
        )
    deletes = "delete" in (settings.get("cleanup.policy") or "delete")
    retention_bytes = int(settings.get("retention.bytes") or -1)
    if deletes and retention_bytes >= 0:
        raise PolicyViolation(
            f"topic {name} deletes what is more than {retention_bytes} bytes (retention.bytes), replayed records with"
            " it: set retention.bytes=-1 for it, or replay into a new topic"
        )
    retention_ms = int(settings.get("retention.ms") or -1)
    age_ms = 0 if oldest_us is None else int(time.time() * 1000) - oldest_us // 1000
    if deletes and 0 <= retention_ms < age_ms:
        raise PolicyViolation(
            f"topic {name} deletes records older than {retention_ms} ms (retention.ms), and the oldest to be replayed "
            f"is {age_ms} ms old: set retention.ms=-1 for it, or replay into a new topic"
        )


async def _settings(cluster: Cluster, name: str) -> dict[str, str | None]:
    resource = {"resource_type": TOPIC_RESOURCE, "resource_name": name, "configuration_keys": None}
    fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}

    def check(answer: Any) -> None:
        for entry in answer.results:
            raise_for(entry.error_code, entry.error_message)

    answer = await cluster.request(ApiKey.DESCRIBE_CONFIGS, fields, check=check, retry_unknown=False)
    return {entry.name: entry.value for entry in answer.results[0].configs}
