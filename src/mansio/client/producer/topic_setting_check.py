"""Check of a topic's setting before records that need it: delays, deduplication.

A broker that does not know the feature, or a topic without the setting, would only store the record's header. So the
setting is read before the first such record of a topic, and again after `CHECK_INTERVAL_S`.

Invariant: calls that wait for the setting of one topic share one request. A refusal is not remembered.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from mansio.config.config_def import ResourceType
from mansio.errors import MansioError
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.net.cluster import Cluster
    from mansio.wire.codec.messages import Struct

CHECK_INTERVAL_S: Final = 10.0
"""How long a topic that had the setting is expected to have it. If it is turned off, the headers of records that are
published in this time have no effect."""

TOPICS_MAX: Final = 10_000
"""Number of topics whose setting is remembered."""


class TopicSettingCheck:
    """Knows which topics have a setting turned on. All methods run on the event loop's thread."""

    def __init__(
        self, cluster: Cluster, setting: str, off: str, new_error: Callable[[str], MansioError]
    ) -> None:
        """`off`: the value of the setting where it is turned off; `new_error` returns the error for such a topic."""
        self._cluster = cluster
        self._setting = setting
        self._off = off
        self._new_error = new_error
        self._checked_s: dict[str, float] = {}
        """Topics with the setting, with the monotonic time in seconds at which that was read."""
        self._requests: dict[str, asyncio.Task[bool]] = {}

    def is_enabled(self, topic: str) -> bool:
        """Whether a topic is known to have the setting; False if that has to be read."""
        checked_s = self._checked_s.get(topic)
        return checked_s is not None and time.monotonic() < checked_s + CHECK_INTERVAL_S

    async def ensure_enabled(self, topic: str) -> None:
        """Raise the error of `new_error` if a topic does not have the setting, `UnknownTopicOrPartition` if it does not
        exist."""
        if self.is_enabled(topic):
            return
        request = self._requests.get(topic)
        if request is None:
            request = asyncio.get_running_loop().create_task(self._read_setting(topic))
            self._requests[topic] = request
            request.add_done_callback(lambda _: self._requests.pop(topic, None))
        try:
            is_enabled = await asyncio.shield(request)
        except MansioError as error:
            raise type(error)(error.message) from error  # each call raises its own error object
        if not is_enabled:
            raise self._new_error(topic)

    async def close(self) -> None:
        """Cancel the requests in progress."""
        requests = [*self._requests.values()]
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    async def _read_setting(self, topic: str) -> bool:
        now_s = time.monotonic()
        resource = {
            "resource_type": ResourceType.TOPIC,
            "resource_name": topic,
            "configuration_keys": [self._setting],
        }
        fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
        response = await self._cluster.request(
            ApiKey.DESCRIBE_CONFIGS, fields, check=_check, retry_unknown_topic=False
        )
        self._checked_s.pop(topic, None)
        values = [entry.value for entry in response.results[0].configs if entry.name == self._setting]
        if all(value in (None, self._off) for value in values):
            return False
        if len(self._checked_s) >= TOPICS_MAX:
            self._checked_s.clear()
        self._checked_s[topic] = now_s
        return True


def _check(response: Struct) -> None:
    for result in response.results:
        raise_for_code(result.error_code, result.error_message)
