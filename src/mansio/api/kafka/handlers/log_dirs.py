"""DescribeLogDirs (KIP-113, KIP-827), which returns partition sizes and free disk space, and AlterReplicaLogDirs.

Behavior: a broker has one data directory. The response has the size and free space of its file system; the size of a
partition is that of its segments.
Topics and partitions that are not on this broker are omitted, as in Kafka.

Not obvious: null requests all topics; an empty list requests the directory alone.
"""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import MansioError
from mansio.host.item_turns import ItemTurns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.partition.partition import Partition
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct

STORAGE_ERROR: Final = 56
UNKNOWN_BYTES: Final = -1
USAGE_TIMEOUT_S: Final = 2.0
"""Maximum time for which the file system may take to report its space."""


async def describe_log_dirs(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Describe the data directory and its partitions. If the file system does not report its space in time, the
    directory has a storage error."""
    del context
    directory = service.settings.data_dir
    code, total_bytes, usable_bytes = 0, UNKNOWN_BYTES, UNKNOWN_BYTES
    try:
        async with asyncio.timeout(
            USAGE_TIMEOUT_S
        ):  # on a thread: a file system that hangs must not stop the loop
            usage = await asyncio.to_thread(shutil.disk_usage, directory)
    except OSError:  # TimeoutError included
        code = STORAGE_ERROR
    else:
        total_bytes, usable_bytes = usage.total, usage.free
    return {
        "results": [
            {
                "error_code": code,
                "log_dir": directory,
                "topics": await _topics(service, request.topics),
                "total_bytes": total_bytes,
                "usable_bytes": usable_bytes,
            }
        ]
    }


async def alter_replica_log_dirs(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Answer requests to move replicas to the only data directory, in which all replicas already are (KIP-113)."""
    del context
    turns = ItemTurns(service.scheduler)
    results: dict[str, list[dict[str, int]]] = {}
    for directory in request.dirs:
        await turns.next()
        for topic in directory.topics:
            await turns.next()
            partitions = results.setdefault(topic.name, [])
            for index in topic.partitions:
                await turns.next()
                error_code = 0
                try:
                    service.partitions.check_directory(topic.name, index, directory.path)
                except MansioError as error:
                    error_code = error.kafka_code
                partitions.append({"partition_index": index, "error_code": error_code})
    return {
        "results": [{"topic_name": name, "partitions": partitions} for name, partitions in results.items()]
    }


async def _topics(service: BrokerServices, wanted: list[Struct] | None) -> list[dict[str, Any]]:
    topics = service.topics.state.topics
    asked: Iterable[tuple[str, Iterable[int]]]
    if wanted is None:
        asked = [(name, range(len(topic.partitions))) for name, topic in topics.items()]
    else:
        asked = ((topic.topic, topic.partitions) for topic in wanted)
    turns = ItemTurns(service.scheduler)
    found = []
    for name, indexes in asked:
        await turns.next()
        here = []
        for index in indexes:
            await turns.next()
            if (partition := service.partitions.get(name, index)) is not None:
                here.append(_size(partition))
        if here:
            found.append({"name": name, "partitions": here})
    return found


def _size(partition: Partition) -> dict[str, Any]:
    return {
        "partition_index": partition.index,
        "partition_size": partition.log.size_bytes,
        "offset_lag": 0,
        "is_future_key": False,
    }
