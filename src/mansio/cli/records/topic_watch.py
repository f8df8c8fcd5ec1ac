"""Notices that a topic which is being read was deleted: a reader of it would wait for ever.

Always true: it is noticed within `POLL_INTERVAL_S` and `UNKNOWN_S_MAX` and the time of a few requests; a broker
that cannot be asked is no reason, the consumer itself says what it makes of that.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import MansioError, UnknownTopicOrPartition

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from mansio.client import Client

POLL_INTERVAL_S: Final = 2.0
RECHECK_INTERVAL_S: Final = 0.25
UNKNOWN_S_MAX: Final = 1.0
"""A broker that has just learnt of a topic, or not yet, may not know it for a moment."""


async def run_unless_deleted(client: Client, topic: str, work: Coroutine[Any, Any, None]) -> None:
    """Does the reading to its end, or raises `UnknownTopicOrPartition` once the topic is gone."""
    reader = asyncio.create_task(work, name="reading")
    watch = asyncio.create_task(_until_deleted(client, topic), name="topic-watch")
    try:
        await asyncio.wait((reader, watch), return_when=asyncio.FIRST_COMPLETED)
        if reader.done():
            return reader.result()
        watch.result()
    finally:
        reader.cancel()
        watch.cancel()
        await asyncio.gather(reader, watch, return_exceptions=True)
    raise UnknownTopicOrPartition(f"topic {topic} was deleted while it was read")


async def _until_deleted(client: Client, topic: str) -> None:
    """Returns when the brokers have not known the topic for `UNKNOWN_S_MAX`."""
    loop = asyncio.get_running_loop()
    unknown_since: float | None = None
    while unknown_since is None or loop.time() - unknown_since < UNKNOWN_S_MAX:
        await asyncio.sleep(POLL_INTERVAL_S if unknown_since is None else RECHECK_INTERVAL_S)
        try:
            await client.admin.describe_topic(topic)
        except UnknownTopicOrPartition:
            unknown_since = loop.time() if unknown_since is None else unknown_since
        except MansioError:
            pass
        else:
            unknown_since = None
