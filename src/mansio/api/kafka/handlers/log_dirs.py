"""DescribeLogDirs (KIP-113, KIP-827), which returns partition sizes and free disk space, and AlterReplicaLogDirs.

Behavior: a broker has one data directory. The response has the size and free space of its file system; the size of a
partition is that of its segments.
Topics and partitions that are not on this broker are omitted, as in Kafka. Without the right there is no directory in
the response, and the error is that of the response (version 3 and later).

Not obvious: null requests all topics; an empty list requests the directory alone.
"""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any, Final

from mansio.broker.services.log_dirs import ReplicaMove
from mansio.errors import MansioError
from mansio.host.item_turns import ItemTurns

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
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
    wanted = None if request.topics is None else [(each.topic, each.partitions) for each in request.topics]
    try:
        found = await service.log_dirs.describe(wanted, caller=context.caller)
    except MansioError as error:
        return {"error_code": error.kafka_code, "results": []}
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
                "topics": [
                    {
                        "name": name,
                        "partitions": [
                            {
                                "partition_index": index,
                                "partition_size": size_bytes,
                                "offset_lag": 0,
                                "is_future_key": False,
                            }
                            for index, size_bytes in sizes
                        ],
                    }
                    for name, sizes in found.items()
                ],
                "total_bytes": total_bytes,
                "usable_bytes": usable_bytes,
            }
        ]
    }


async def alter_replica_log_dirs(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Answer requests to move replicas to the only data directory, in which all replicas already are (KIP-113)."""
    turns = ItemTurns(service.scheduler)
    moves = []
    for directory in request.dirs:
        for topic in directory.topics:
            await turns.next(1 + len(topic.partitions))
            moves += [ReplicaMove(topic.name, index, directory.path) for index in topic.partitions]
    errors = await service.log_dirs.move_each(moves, caller=context.caller)
    results: dict[str, list[dict[str, int]]] = {}
    for move, error in zip(moves, errors, strict=True):
        await turns.next()
        code = 0 if error is None else error.kafka_code
        results.setdefault(move.topic, []).append({"partition_index": move.partition, "error_code": code})
    return {
        "results": [{"topic_name": name, "partitions": partitions} for name, partitions in results.items()]
    }
