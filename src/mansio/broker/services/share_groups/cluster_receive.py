"""Receive from all brokers of a cluster: one call of a client, whose records may come from partitions of any leader.

The leaders are asked in turn until there are enough records. The first one is random, in proportion to the partitions
that each leads, so that over many calls all partitions are served alike. If none has records, the call waits until one
of them may have some, and asks them again.

Invariants:
* The result has at most the records and about the bytes that were asked for, all leased to one member.
* Nothing is leased while the call waits.
* When the call fails, the leases of its member are released at all brokers that can be reached; others expire.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Final

from mansio.broker.coordinator.share.lease_forwarder import FORWARDING_TIMEOUT_MS
from mansio.broker.coordinator.share.received_records import ReceiveResult
from mansio.errors import (
    AuthorizationFailed,
    BrokerUnreachable,
    ConnectionLost,
    LeaderNotAvailable,
    MansioError,
)
from mansio.ports import Backoff, complete
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from mansio.broker.coordinator.share.lease_forwarder import LeaseForwarder, TopicIndex
    from mansio.broker.coordinator.share.received_records import ReceivedRecord
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.share_groups.receive_records import ReceiveService
    from mansio.ports import Clock, Promise, Random, Scheduler

ROUND_RETRY_MS: Final = 50
"""Time between two rounds if there is nothing to wait for: a leader has failed, or what was available is not any
more."""

ROUND_BACKOFF: Final = Backoff(ROUND_RETRY_MS, 1_000, jitter=0)
"""Times between rounds while this goes on."""

REQUEST_MS_MIN: Final = 2_000
"""Minimum time that a broker has to answer, also at the end of the call's time."""

FURTHER_MS_MAX: Final = 500
"""Maximum time that a broker has to answer when others have given records already, because their leases run."""

FURTHER_MS_MIN: Final = 50
"""Minimum of this time, also for leases of 0 ms."""

BUSY_MS: Final = 500
"""Time between two rounds if too many calls wait for records of other brokers."""


@dataclass(frozen=True, slots=True)
class ReceiveRequest:
    """Arguments of `ReceiveService.receive_records`."""

    group_id: str
    topics: Collection[str]
    max_records: int
    max_bytes: int
    lease_ms: int
    caller: Caller


class ClusterReceive:
    """One call; `run` is called once."""

    def __init__(
        self,
        request: ReceiveRequest,
        *,
        receive: ReceiveService,
        forwarder: LeaseForwarder,
        scheduler: Scheduler,
        clock: Clock,
        random: Random,
    ) -> None:
        self._request = request
        self._receive = receive
        self._forwarder = forwarder
        self._scheduler = scheduler
        self._clock = clock
        self._random = random
        self._member_id = receive.new_member_id()
        self._records: list[ReceivedRecord] = []
        self._size_bytes = 0
        self._lock_ms = 0
        self._throttle_ms = 0
        self._errors: dict[TopicIndex, MansioError] = {}
        self._asked: set[int] = set()
        """Brokers that have, or may have, leases of the member."""
        self._lost: set[int] = set()
        """Brokers that did not answer. Their leases are being released, so they are not asked again."""

    async def run(self, max_wait_ms: int) -> ReceiveResult:
        """Return records, or none after `max_wait_ms` or at the deadline of the caller. Errors are in the result.
        Raises `LeaderNotAvailable` if no partition has a leader, and the `AuthorizationFailed` of the broker that
        refuses the caller."""
        now = self._clock.monotonic()
        deadline = now + self._request.caller.timeout_ms(max_wait_ms, now) / 1000
        is_returned = is_promised = False
        retries = 0
        try:
            while True:
                leaders = self._forwarder.partitions_by_leader(self._request.topics)
                self._errors = {}
                await self._ask_in_turn(leaders, deadline)
                now = self._clock.monotonic()
                left_ms = (deadline - now) * 1000
                if self._records or left_ms <= 0 or self._is_hopeless(leaders):
                    break
                if is_promised or self._errors or not leaders:
                    retries += 1
                    await self._scheduler.sleep(min(left_ms, ROUND_BACKOFF.delay_ms(retries)))
                    is_promised = False
                else:
                    is_promised = await self._wait(leaders, left_ms)
                    if self._clock.monotonic() - now > ROUND_RETRY_MS / 1000:
                        retries = 0
                    else:
                        is_promised = True  # an empty round after this one is followed by a pause
            if not leaders:
                names = ", ".join(sorted(self._request.topics))
                raise LeaderNotAvailable(f"no broker leads a partition of {names}")
            is_returned = True
            return ReceiveResult(
                self._member_id, self._records, self._lock_ms, self._errors, self._throttle_ms
            )
        finally:
            if not is_returned:
                self._release(self._asked)

    def _is_hopeless(self, leaders: Mapping[int, list[TopicIndex]]) -> bool:
        """Whether another round would not find records: a partition has an error that stays, or no broker answers."""
        return any(not error.retriable for error in self._errors.values()) or bool(
            leaders and self._lost.issuperset(leaders)
        )

    async def _ask_in_turn(self, leaders: Mapping[int, list[TopicIndex]], deadline: float) -> None:
        """Ask the leaders one after the other until there are enough records."""
        for node_id in self._order(leaders):
            if len(self._records) >= self._request.max_records or self._size_bytes >= self._request.max_bytes:
                break
            try:
                self._add(await self._ask(node_id, self._timeout_ms(deadline)))
            except AuthorizationFailed:
                raise
            except MansioError as error:
                self._errors.update(dict.fromkeys(leaders[node_id], without_traceback(error)))

    def _timeout_ms(self, deadline: float) -> float:
        """Return the time that the next broker has to answer."""
        if self._records:
            return min(FURTHER_MS_MAX, max(self._lock_ms / 4, FURTHER_MS_MIN))
        left_ms = (deadline - self._clock.monotonic()) * 1000
        return min(max(left_ms, REQUEST_MS_MIN), FORWARDING_TIMEOUT_MS)

    def _order(self, leaders: Mapping[int, list[TopicIndex]]) -> list[int]:
        """Return the leaders in the order of their partitions, beginning with a random partition."""
        by_partition = [node_id for node_id, partitions in leaders.items() for _ in partitions]
        if not by_partition:
            return []
        first = int(self._random.uniform(0, len(by_partition))) % len(by_partition)
        return list(dict.fromkeys([*by_partition[first:], *by_partition[:first]]))

    async def _wait(self, node_ids: Collection[int], wait_ms: float) -> bool:
        """Wait until a broker may have records, at most `wait_ms`. Return whether one may."""
        request, forwarder = self._request, self._forwarder
        done: Promise[bool] = self._scheduler.promise()

        def finish(*, is_available: bool) -> None:
            complete(done, is_available)

        async def wait(node_id: int) -> None:
            is_available = True  # after an error, which the next round reports
            try:
                if node_id == forwarder.node_id:
                    is_available = await self._receive.wait_for_records(
                        request.group_id, request.topics, max_wait_ms=ceil(wait_ms)
                    )
                else:
                    is_available = await forwarder.wait_for_records(node_id, request.group_id, request.topics)
            except MansioError:
                pass
            finally:
                finish(is_available=is_available)

        if not all(
            node_id == forwarder.node_id or forwarder.may_wait(node_id, request.group_id, request.topics)
            for node_id in node_ids
        ):
            wait_ms = min(wait_ms, BUSY_MS)
            node_ids = {forwarder.node_id}.intersection(node_ids)
        timer = self._scheduler.call_later(wait_ms, lambda: finish(is_available=False))
        waits = [self._scheduler.spawn(wait(node_id), name="wait for records") for node_id in node_ids]
        try:
            return await done
        finally:
            timer.cancel()
            for each in waits:
                each.cancel()

    async def _ask(self, node_id: int, timeout_ms: float) -> ReceiveResult:
        """Request the records that are still wanted from one broker, which may be this one."""
        if node_id in self._lost:
            raise ConnectionLost(f"broker {node_id} did not answer")
        self._asked.add(node_id)
        request = self._request
        records_left = request.max_records - len(self._records)
        bytes_left = request.max_bytes - self._size_bytes
        if node_id == self._forwarder.node_id:
            return await self._receive.receive_records(
                request.group_id,
                request.topics,
                max_records=records_left,
                max_wait_ms=0,
                max_bytes=bytes_left,
                lease_ms=request.lease_ms,
                member_id=self._member_id,
                caller=request.caller,
            )
        try:
            return await self._forwarder.receive(
                node_id,
                request.group_id,
                request.topics,
                member_id=self._member_id,
                max_records=records_left,
                max_bytes=bytes_left,
                lease_ms=request.lease_ms,
                caller=request.caller,
                timeout_ms=timeout_ms,
            )
        except BrokerUnreachable:
            raise
        except ConnectionLost:
            self._lost.add(node_id)
            self._release({node_id})
            raise

    def _add(self, result: ReceiveResult) -> None:
        self._records += result.records
        self._size_bytes += sum(len(each.key or b"") + len(each.value or b"") for each in result.records)
        self._lock_ms = self._lock_ms or result.lock_ms
        self._throttle_ms = max(self._throttle_ms, result.throttle_ms)
        self._errors.update(result.errors)

    def _release(self, node_ids: Collection[int]) -> None:
        """Release the leases of the member on these brokers in the background."""
        for node_id in node_ids:
            self._scheduler.spawn(self._release_at(node_id), name="release leases")

    async def _release_at(self, node_id: int) -> None:
        group_id, caller = self._request.group_id, self._request.caller
        try:
            if node_id == self._forwarder.node_id:
                await self._receive.release(group_id, self._member_id)
            else:
                await self._forwarder.release(node_id, group_id, self._member_id, caller)
                self._lost.discard(node_id)
        except MansioError:
            return  # the leases expire
