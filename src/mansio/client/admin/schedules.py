"""Administration of recurring schedules; available as `client.admin.schedules`.

Requests are Mansio's own and go to the leaders of the partitions.

Invariants:
* A name is looked for in all partitions of the topic before a schedule is created. Two clients that create schedules
  with one name and different keys at the same time may create both; the other methods change all of a name.
* Each method can be repeated after any failure.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, get_args
from uuid import UUID, uuid4

from mansio.client.admin.delays import CHANGE_TIMEOUT_MS, VALUE_BYTES_MAX, WHOLE_VALUE
from mansio.client.producer.delays import delay_check
from mansio.client.producer.producer import serialize_fields
from mansio.errors import (
    ConnectionLost,
    InvalidRequest,
    InvalidSchedule,
    RequestTimedOut,
    ScheduleAlreadyExists,
    ScheduleNotFound,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from mansio.host.clock import UNIX_EPOCH
from mansio.net.offsets import request_leaders
from mansio.net.retry import client_error_for_code, raise_for_code
from mansio.tracebacks import copied
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.mansio_apis import NO_DUE_MS, ScheduleChange
from mansio.wire.batch.schedule_control_records import CatchUpMode
from mansio.wire.murmur2 import partition_for_key
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.client.types import HeadersLike
    from mansio.net.cluster import Cluster


QUERIES_PER_REQUEST: Final = 16

_MILLISECOND: Final = timedelta(milliseconds=1)
_EVERY_MIN: Final = timedelta(seconds=1)
_EVERY_MAX: Final = timedelta(days=366)

CatchUp = Literal["none", "last", "all"]
"""Which firings of a schedule are caught up that were missed by more than a minute."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A recurring schedule, and its next firings.

    It has either `cron`, evaluated in the time zone `timezone`, or `every`, counted from `created`. `catch_up`: which
    missed firings are caught up. `next_times`: the next due times, empty while it is paused; `firings`: number of
    records that it has appended. In a list `value` may be truncated; `value_size` is the size of the whole value (None
    for null). `error`: why it cannot fire at present, None if it can."""

    topic: str
    partition: int
    name: str
    id: UUID
    cron: str | None
    every: timedelta | None
    timezone: str
    catch_up: CatchUp
    key: bytes | None
    value: bytes | None
    value_size: int | None
    headers: tuple[tuple[str, bytes | None], ...]
    created: datetime
    is_paused: bool
    next_times: tuple[datetime, ...]
    firings: int
    error: str | None = None

    @property
    def next_due(self) -> datetime | None:
        """When it is due next; None while it is paused, or if it never fires again."""
        return self.next_times[0] if self.next_times else None


class ScheduleAdmin:
    """Administration of recurring schedules of one cluster; available as `client.admin.schedules`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def create(
        self,
        topic: str,
        name: str,
        value: bytes | str | None,
        *,
        cron: str | None = None,
        every: timedelta | float | None = None,
        timezone: str | None = None,
        catch_up: CatchUp = "none",
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        partition: int | None = None,
    ) -> Schedule:
        """Publish a record again and again: when `cron` (five fields) matches the wall clock of `timezone` (an IANA
        name; None for UTC), or `every` so many seconds from now on.

        `catch_up`: whether none, the last or all firings are caught up that were missed by more than a minute. Without
        `partition`, the key chooses it as a producer does, or else the name. A schedule that exists with the same
        definition is returned as it is: if it is paused, it stays so, see `is_paused` and `resume`.

        Raises `ValueError` for an interval that is not between 1 second and 366 days or not of whole milliseconds,
        `InvalidSchedule`, `DelaysNotEnabled` if the topic lacks `mansio.delay.enable=true`,
        `ScheduleAlreadyExists` if there is another one with this name, and `UnknownTopicOrPartition`."""
        _check_texts(name, cron, timezone)
        record = serialize_fields(value, key, headers, None, None)
        fields = {
            "change": ScheduleChange.CREATE,
            "name": name,
            "id": uuid4().bytes,
            "cron": cron or "",
            "every_ms": _every_ms(every),
            "timezone": _zone_name(timezone, cron),
            "catch_up": _catch_up(catch_up),
            "key": record.key,
            "value": record.value,
            "headers": [{"name": header, "value": content} for header, content in record.headers],
        }
        partitions = await self._partitions(topic)
        await delay_check(self._cluster).ensure_enabled(topic)
        if partition is not None and TopicPartition(topic, partition) not in partitions:
            raise UnknownTopicOrPartition(f"topic {topic} has no partition {partition}")
        existing = await self._find(topic, name)
        if existing:
            chosen = existing[0].partition
            if partition not in (None, chosen):
                raise ScheduleAlreadyExists(
                    f"schedule {name!r} exists in partition {chosen}:"
                    f" mansio schedule delete {shlex.quote(name)} --topic {topic}"
                )
        elif partition is not None:
            chosen = partition
        else:
            text = name.encode() if record.key is None else record.key
            chosen = partition_for_key(text, len(partitions))
        try:
            await self._alter(TopicPartition(topic, chosen), fields)
        except InvalidRequest as error:
            raise InvalidSchedule(error.message) from error
        return await self.describe(topic, name)

    async def list(self, topic: str, *, times: int = 5) -> Sequence[Schedule]:
        """The schedules of a topic, sorted by name, each with its next `times` due times. Values are truncated to
        1 KiB, see `describe`. Raises `UnknownTopicOrPartition`."""
        return await self._list(await self._partitions(topic), None, times, VALUE_BYTES_MAX)

    async def describe(self, topic: str, name: str, *, times: int = 5) -> Schedule:
        """A schedule with its whole value and its next `times` due times. Raises `ScheduleNotFound`."""
        found = await self._list(await self._partitions(topic), name, times, WHOLE_VALUE)
        if not found:
            raise _not_found(topic, name)
        return found[0]

    async def pause(self, topic: str, name: str) -> None:
        """Stop the firings of a schedule. Raises `ScheduleNotFound`."""
        await self._change(topic, name, ScheduleChange.PAUSE)

    async def resume(self, topic: str, name: str) -> None:
        """Let a paused schedule fire again, from its next due time on; firings in the pause are not caught up. Raises
        `ScheduleNotFound`."""
        await self._change(topic, name, ScheduleChange.RESUME)

    async def delete(self, topic: str, name: str) -> None:
        """Delete a schedule; its records stay. Raises `ScheduleNotFound`."""
        await self._change(topic, name, ScheduleChange.DELETE)

    # Requests

    async def _partitions(self, topic: str) -> Sequence[TopicPartition]:
        view = await self._cluster.topic(topic, wait_ms=0, may_create=False)
        return [TopicPartition(topic, partition.index) for partition in view.partitions]

    async def _find(self, topic: str, name: str) -> Sequence[Schedule]:
        return await self._list(await self._partitions(topic), name, 0, 0)

    async def _change(self, topic: str, name: str, change: ScheduleChange) -> None:
        """Change all schedules with this name; there is more than one only after racing creations.

        If a list has none, each leader is asked for the change: unlike a list, that waits until a deletion is
        committed, so `ScheduleNotFound` is final."""
        found = [TopicPartition(topic, one.partition) for one in await self._find(topic, name)]
        count = 0
        for partition in found or await self._partitions(topic):
            try:
                await self._alter(partition, {"change": change, "name": name})
            except ScheduleNotFound:
                continue
            count += 1
        if not count:
            raise _not_found(topic, name)

    async def _alter(self, partition: TopicPartition, change: Mapping[str, Any]) -> None:
        cluster = self._cluster
        is_certain = True

        async def send(
            node_id: int,
            requests: Mapping[TopicPartition, None],
            results: dict[TopicPartition, bool],
        ) -> None:
            nonlocal is_certain
            (one,) = requests
            topic_id = (await cluster.topic(one.topic)).topic_id
            fields = {
                "topic_id": topic_id,
                "partition_index": one.partition,
                **change,
                "timeout_ms": CHANGE_TIMEOUT_MS,
            }
            connection = await cluster.connection(node_id)
            try:
                response = await connection.request(ApiKey.ALTER_SCHEDULES, fields)
                if response.error_code == UnknownTopicId.kafka_code:
                    cluster.mark_stale((one.topic,))
                _raise_for_code(response.error_code, response.error_message)
            except (ConnectionLost, RequestTimedOut):
                is_certain = False
                raise
            except ScheduleNotFound:
                if is_certain or change["change"] != ScheduleChange.DELETE:
                    raise  # otherwise an earlier attempt, whose answer was lost, has deleted it
            results[one] = True

        await request_leaders(cluster, {partition: None}, send)

    async def _list(
        self, partitions: Sequence[TopicPartition], name: str | None, times_max: int, value_bytes_max: int
    ) -> Sequence[Schedule]:
        cluster = self._cluster

        async def send(
            node_id: int,
            requests: Mapping[TopicPartition, None],
            results: dict[TopicPartition, Sequence[Schedule]],
        ) -> None:
            connection = await cluster.connection(node_id)
            wanted = [*requests]
            failure = None
            for begin in range(0, len(wanted), QUERIES_PER_REQUEST):
                chunk = wanted[begin : begin + QUERIES_PER_REQUEST]
                queries = [
                    {
                        "topic_id": (await cluster.topic(one.topic)).topic_id,
                        "partition_index": one.partition,
                        "name": name,
                    }
                    for one in chunk
                ]
                fields = {"queries": queries, "times_max": times_max, "value_bytes_max": value_bytes_max}
                response = await connection.request(ApiKey.LIST_SCHEDULES, fields)
                raise_for_code(response.error_code, response.error_message)
                for one, result in zip(chunk, response.results, strict=True):
                    if result.error_code:
                        failure = client_error_for_code(result.error_code, result.error_message)
                        if isinstance(failure, UnknownTopicId):
                            cluster.mark_stale((one.topic,))
                    else:
                        results[one] = [_schedule(one, entry) for entry in result.schedules]
            if failure is not None:
                raise copied(failure)

        found = await request_leaders(cluster, dict.fromkeys(partitions), send)
        return sorted((one for several in found.values() for one in several), key=_sort_key)


def _schedule(partition: TopicPartition, entry: Any) -> Schedule:
    times_ms = entry.next_times_ms
    if not times_ms and entry.next_due_ms != NO_DUE_MS:
        times_ms = [entry.next_due_ms]
    return Schedule(
        partition.topic,
        partition.partition,
        entry.name,
        UUID(bytes=entry.id or bytes(16)),
        entry.cron or None,
        entry.every_ms * _MILLISECOND if entry.every_ms else None,
        entry.timezone,
        get_args(CatchUp)[entry.catch_up],
        entry.key,
        entry.value,
        None if entry.value_size < 0 else entry.value_size,
        tuple((header.name, header.value) for header in entry.headers),
        _moment(entry.created_ms),
        entry.is_paused,
        tuple(map(_moment, times_ms)),
        entry.firings,
        entry.error_message,
    )


def _moment(milliseconds: int) -> datetime:
    return UNIX_EPOCH + timedelta(milliseconds=milliseconds)


def _sort_key(schedule: Schedule) -> tuple[str, int]:
    return schedule.name, schedule.partition


def _raise_for_code(code: int, message: str | None) -> None:
    """Raise the error for the code of a response about one schedule; do nothing for code 0."""
    for kind in (ScheduleNotFound, ScheduleAlreadyExists):
        if code == kind.kafka_code:
            raise kind(message or "")
    raise_for_code(code, message)


def _not_found(topic: str, name: str) -> ScheduleNotFound:
    return ScheduleNotFound(f"topic {topic} has no schedule {name!r}")


def _check_texts(name: object, cron: object, timezone: object) -> None:
    """Raise `ValueError` for arguments that are not texts, and `InvalidSchedule` for empty ones."""
    for argument, text, is_optional in (
        ("name", name, False),
        ("cron", cron, True),
        ("timezone", timezone, True),
    ):
        if not isinstance(text, str) and not (is_optional and text is None):
            raise ValueError(f"{argument}: not a text: {text!r}")
    if cron is not None and not str(cron).strip():
        raise InvalidSchedule("the cron expression is empty")
    if timezone == "":
        raise InvalidSchedule("the time zone is empty; for UTC leave it out")


def _every_ms(every: timedelta | float | None) -> int:
    """Return an interval in ms, 0 for None. Raises `ValueError`."""
    if every is None:
        return 0
    if isinstance(every, timedelta):
        duration = every
    elif not isinstance(every, int | float) or isinstance(every, bool):
        raise ValueError(f"every: not a timedelta or a number of seconds: {every!r}")
    else:  # neither NaN nor what a timedelta cannot have; the limits are checked below
        duration = timedelta(seconds=every) if 0 <= every <= _EVERY_MAX.total_seconds() else timedelta()
    if not _EVERY_MIN <= duration <= _EVERY_MAX:
        raise ValueError(f"every: an interval is at least 1 second and at most 366 days, not {every}")
    every_ms, rest = divmod(duration, _MILLISECOND)
    if rest:
        raise ValueError(f"every: not a whole number of milliseconds: {every}")
    return every_ms


def _zone_name(timezone: str | None, cron: str | None) -> str:
    if timezone is None:
        return "" if cron is None else "UTC"
    return timezone


def _catch_up(name: str) -> CatchUpMode:
    try:
        return CatchUpMode[name.upper()]
    except (AttributeError, KeyError):
        raise InvalidSchedule(f"catch_up is none, last or all, not {name!r}") from None
