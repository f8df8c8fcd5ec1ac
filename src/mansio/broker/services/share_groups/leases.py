"""Lease service: receives and acknowledges single records of a share group, for protocols whose clients name a leased
record by a receipt.

A receipt names one delivery of one record. It contains the id of the member that has the lease; this id is random and
the share partition checks it, so a receipt cannot be made up, and every broker that leads the partition accepts it,
also after a restart. In a cluster every broker receives from and acknowledges at the leaders of all partitions.

Invariants:
* Every acknowledgement has its own result: one whose lease is lost does not affect the others.
* A result is returned after the change of the record's state is stored.
* A change continues when its caller is cancelled.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.broker.coordinator.group.error_mapping import check_group_id
from mansio.broker.services.share_groups.cluster_receive import ClusterReceive, ReceiveRequest
from mansio.broker.services.share_groups.receive_records import BYTES_MAX, RECEIVED_RECORDS_MAX
from mansio.broker.services.share_groups.share import PartitionAcknowledgements
from mansio.errors import (
    AuthorizationFailed,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    GroupIdNotFound,
    InvalidReceipt,
    InvalidRecordState,
    InvalidRequest,
    MansioError,
    NotCoordinator,
    Unavailable,
    UnknownTopicOrPartition,
)
from mansio.host.gather_results import gather_results
from mansio.ports import complete, complete_with_error
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.state.share_partition.types import (
    ACCEPT,
    LEASE_MS_MAX,
    REJECT,
    RELEASE,
    RENEW,
    REQUESTED_DELAY_MS_MAX,
    AcknowledgementBatch,
)
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Iterable, Sequence

    from mansio.broker.coordinator.group.group_coordinator import GroupCoordinator
    from mansio.broker.coordinator.share.lease_forwarder import LeaseForwarder
    from mansio.broker.coordinator.share.received_records import ReceivedRecord, ReceiveResult
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.services.groups import GroupService
    from mansio.broker.services.share_groups.receive_records import ReceiveService
    from mansio.broker.services.share_groups.share import ShareService
    from mansio.broker.topics.topics import TopicService
    from mansio.ports import Clock, Promise, Random, Scheduler

ACKNOWLEDGEMENTS_MAX: Final = 10_000
"""Maximum number of acknowledgements in one call."""

REASON_CHARACTERS_MAX: Final = 1000
"""Maximum length of the reason of a rejection in characters."""

REGISTERED_MS: Final = 5_000
"""Time after which a group is registered again at a coordinator that is another broker."""

FORWARDED_AT_ONCE_MAX: Final = 8
"""Maximum number of records of one call that are acknowledged at the same time, each in a request, in a cluster."""

REGISTERED_MAX: Final = 10_000
"""Maximum number of groups and topics that are remembered as registered."""

_RECEIPT: Final = struct.Struct(">16s16sIQI")
_RECEIPT_CHARACTERS: Final = 64
_FROM_URL_SAFE: Final = bytes.maketrans(b"-_+/", b"+/!!")
"""From the URL-safe alphabet to the standard one, whose two other characters become invalid."""


class Receipt(NamedTuple):
    """One delivery of one record. `delivery_count`: 1 for the first delivery."""

    member_id: str
    topic_id: bytes
    partition: int
    offset: int
    delivery_count: int

    def encode(self) -> str:
        """Return the receipt as 64 characters of the URL-safe Base64 alphabet (RFC 4648)."""
        packed = _RECEIPT.pack(
            bytes.fromhex(self.member_id), self.topic_id, self.partition, self.offset, self.delivery_count
        )
        return base64.urlsafe_b64encode(packed).decode()

    @staticmethod
    def decode(text: str) -> Receipt:
        """Return the receipt in `text`. Raises `InvalidReceipt`."""
        try:
            if len(text) != _RECEIPT_CHARACTERS:
                raise ValueError(text)
            packed = binascii.a2b_base64(text.encode().translate(_FROM_URL_SAFE), strict_mode=True)
            member, topic_id, partition, offset, delivery_count = _RECEIPT.unpack(packed)
        except (ValueError, struct.error, binascii.Error) as error:
            raise InvalidReceipt("a receipt is the text that came with a received record") from error
        if partition >= 1 << 31 or offset >= 1 << 63 or not 1 <= delivery_count < 1 << 31:
            raise InvalidReceipt("a receipt is the text that came with a received record")
        return Receipt(member.hex(), topic_id, partition, offset, delivery_count)


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """What becomes of one leased record.

    `kind`: `ACCEPT`, `RELEASE`, `REJECT` or `RENEW`. `delay_ms`: of a release, the time before the record is offered
    again, -1 for the group's backoff; of a renewal, the duration of the lease from now on, -1 for an unchanged one.
    `reason`: reason of a rejection, stored with the dead letter.
    """

    receipt: str
    kind: int
    delay_ms: int = -1
    reason: str = ""


class LeaseService:
    """Receives records of share groups and acknowledges them by receipt. All methods run on the broker's event loop."""

    __slots__ = (
        "_authorization",
        "_clock",
        "_forwarder",
        "_group_coordinator",
        "_groups",
        "_random",
        "_receive",
        "_registered",
        "_scheduler",
        "_share_service",
        "_storing",
        "_topics",
    )

    def __init__(
        self,
        *,
        receive: ReceiveService,
        share_service: ShareService,
        group_coordinator: GroupCoordinator,
        groups: GroupService,
        topics: TopicService,
        clock: Clock,
        scheduler: Scheduler,
        random: Random,
        forwarder: LeaseForwarder | None,
        authorization: Authorization,
    ) -> None:
        """Create the service. `forwarder`: None on a single node."""
        self._authorization = authorization
        self._receive = receive
        self._share_service = share_service
        self._group_coordinator = group_coordinator
        self._groups = groups
        self._topics = topics
        self._clock = clock
        self._scheduler = scheduler
        self._random = random
        self._forwarder = forwarder
        self._storing: dict[str, Promise[None]] = {}
        """By receipt, the promise that completes when the change of the record is stored."""
        self._registered: OrderedDict[tuple[str, bytes, int], float] = OrderedDict()
        """Groups, topic ids and numbers of partitions that other coordinators know, with the time of monotonic seconds
        until which they are not registered again."""

    async def receive(
        self,
        group_id: str,
        topics: Collection[str],
        *,
        max_records: int,
        max_wait_ms: int,
        max_bytes: int = BYTES_MAX,
        lease_ms: int = -1,
        caller: Caller,
    ) -> ReceiveResult:
        """Lease records, as `ReceiveService.receive_records` does. `lease_ms`: 0 to 12 h, -1 for the group's. The
        caller needs READ for the group and the topics.

        Raises `GroupIdNotFound` also if the id is that of a group of another type."""
        self._check_rights(group_id, topics, caller)
        self.check(group_id, lease_ms)
        await self.register(group_id, topics, caller=caller)
        if self._forwarder is None:
            return await self._receive.receive_records(
                group_id,
                topics,
                max_records=max_records,
                max_wait_ms=max_wait_ms,
                max_bytes=max_bytes,
                lease_ms=lease_ms,
                caller=caller,
            )
        if max_records < 1 or max_bytes < 1:
            raise InvalidRequest("max_records and max_bytes must be at least 1")
        one = ClusterReceive(
            ReceiveRequest(
                group_id,
                topics,
                min(max_records, RECEIVED_RECORDS_MAX),
                min(max_bytes, BYTES_MAX),
                lease_ms,
                caller,
            ),
            receive=self._receive,
            forwarder=self._forwarder,
            scheduler=self._scheduler,
            clock=self._clock,
            random=self._random,
        )
        return await one.run(max_wait_ms)

    def _check_rights(self, group_id: str, topics: Iterable[str], caller: Caller) -> None:
        """Raise `GroupAuthorizationFailed` or `TopicAuthorizationFailed` unless the caller may receive records."""
        self._authorization.check(caller, Operation.READ, ResourceType.GROUP, group_id)
        self._authorization.check_all(caller, Operation.READ, ResourceType.TOPIC, topics)

    @staticmethod
    def check(group_id: str, lease_ms: int) -> None:
        """Raise `InvalidGroupId` or `InvalidRequest` if `receive` would refuse one of these."""
        if not -1 <= lease_ms <= LEASE_MS_MAX:
            raise InvalidRequest(f"lease_ms: 0 to {LEASE_MS_MAX} (12 hours)")
        check_group_id(group_id)

    async def register(self, group_id: str, topics: Collection[str], *, caller: Caller) -> None:
        """Create a share group that does not exist, and record that it has state of these topics, so that it can be
        listed and reset, and its state is deleted with it. Does nothing while the coordinator of the group is not
        available, or does not know a new topic yet: a later call repeats it. The caller needs READ for the group and
        the topics.

        Raises `GroupAuthorizationFailed`, `TopicAuthorizationFailed`, `UnknownTopicOrPartition`, and `GroupIdNotFound`
        if the id is that of a group of another type."""
        self._check_rights(group_id, topics, caller)
        found = [self._topics.find(name) for name in topics]
        if self._forwarder is not None:
            now = self._clock.monotonic()
            keys = [(group_id, each.topic_id.bytes, len(each.partitions)) for each in found]
            if all(self._registered.get(key, 0.0) > now for key in keys):
                return
            try:
                coordinator = await self._groups.find_coordinator(group_id, caller=caller)
                if coordinator is not None:
                    await self._forwarder.register(coordinator.node_id, group_id, topics, caller)
                    self._registered |= dict.fromkeys(keys, now + REGISTERED_MS / 1000)
                    while len(self._registered) > REGISTERED_MAX:
                        self._registered.popitem(last=False)
                    return
            except (Unavailable, UnknownTopicOrPartition):
                return
        try:
            await self._run_to_end(
                self.register_here(group_id, topics, caller=caller), name="register share group"
            )
        except (NotCoordinator, CoordinatorNotAvailable, CoordinatorLoadInProgress):
            return

    async def register_here(self, group_id: str, topics: Collection[str], *, caller: Caller) -> None:
        """Register a share group that this broker coordinates; see `register`. Raises its errors, and those of the
        coordinator."""
        self._check_rights(group_id, topics, caller)
        groups = self._group_coordinator.share_groups
        found = [self._topics.find(name) for name in topics]
        try:
            entry, group = groups.find(group_id)
        except GroupIdNotFound:
            entry, group = await groups.find_or_create(group_id)
        for topic in found:
            initialized = group.state_partitions.initialized
            known = {
                index
                for each in initialized
                if each.topic_id == topic.topic_id.bytes
                for index in each.partitions
            }
            indexes = [index for index in range(len(topic.partitions)) if index not in known]
            if indexes:
                await groups.add_initialized_partitions(
                    entry, group, topic.topic_id.bytes, topic.name, indexes
                )

    async def _run_to_end(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Wait for `work`, which continues when the caller is cancelled. Raises its `MansioError`."""
        done: Promise[None] = self._scheduler.promise()

        async def run() -> None:
            error: MansioError | None = Unavailable(f"{name}: interrupted by an unexpected error")
            try:  # the scheduler logs an unexpected error
                await work
                error = None
            except MansioError as expected:
                error = without_traceback(expected)
            finally:
                if error is not None:
                    complete_with_error(done, copied(error))
                else:
                    complete(done, None)

        self._scheduler.spawn(run(), name=name)
        await done

    @staticmethod
    def receipt_of(result: ReceiveResult, record: ReceivedRecord) -> str:
        """Return the receipt of a record of `result`."""
        return Receipt(
            result.member_id, record.topic_id, record.partition, record.offset, record.delivery_count
        ).encode()

    async def release(self, group_id: str, member_id: str, *, caller: Caller) -> None:
        """Release the leases of a result whose records did not reach the client; the deliveries are not counted. Those
        of a broker that cannot be reached expire. This needs no right: the broker gives back what it has taken for the
        caller, also if the caller has lost its right meanwhile."""
        works = [self._receive.release(group_id, member_id)]
        if self._forwarder is not None:
            works += [
                self._forwarder.release(node_id, group_id, member_id, caller)
                for node_id in self._forwarder.other_brokers
            ]
        await gather_results(self._scheduler, works, name="release leases")

    async def acknowledge(
        self, group_id: str, acknowledgements: Sequence[Acknowledgement], *, caller: Caller
    ) -> list[MansioError | None]:
        """Acknowledge leased records; return an error or None for each, in the order of `acknowledgements`. The caller
        needs READ for the group and the topics: a receipt gives no right.

        The errors of single records are `InvalidReceipt`, `InvalidRequest` for a kind or delay out of range,
        `InvalidRecordState` if the lease is lost, `TopicAuthorizationFailed`, and those of the partition. Raises
        `GroupAuthorizationFailed`, `InvalidGroupId`, and `InvalidRequest` for more than `ACKNOWLEDGEMENTS_MAX`
        acknowledgements.
        """
        self._authorization.check(caller, Operation.READ, ResourceType.GROUP, group_id)
        if len(acknowledgements) > ACKNOWLEDGEMENTS_MAX:
            raise InvalidRequest(f"{len(acknowledgements)} records; at most {ACKNOWLEDGEMENTS_MAX} per call")
        results: list[MansioError | None] = [None] * len(acknowledgements)
        receipts = {each.receipt for each in acknowledgements}
        # A change of a record that is being stored would refuse the next one, although the lease has not ended.
        while storing := next((self._storing[each] for each in receipts if each in self._storing), None):
            await self._wait_until_done(storing)
        done: Promise[None] = self._scheduler.promise()
        self._storing |= dict.fromkeys(receipts, done)

        async def store() -> None:
            try:
                await self._apply(group_id, acknowledgements, results, caller)
            finally:
                for each in receipts:
                    del self._storing[each]
                done.set_result(None)

        await self._run_to_end(store(), name="acknowledge records")
        return results

    async def _wait_until_done(self, other: Promise[None]) -> None:
        """Wait for a promise that others wait for, too: to cancel one that is awaited would cancel it for all."""
        own: Promise[None] = self._scheduler.promise()

        def finish(_: object) -> None:
            complete(own, None)

        other.add_done_callback(finish)
        await own

    async def _apply(
        self,
        group_id: str,
        acknowledgements: Sequence[Acknowledgement],
        results: list[MansioError | None],
        caller: Caller,
    ) -> None:
        """Apply acknowledgements and set their results. Of several with one receipt only the first has an effect."""
        known: set[str] = set()
        by_partition: dict[tuple[str, bytes, int], list[tuple[Receipt, Acknowledgement, int]]] = defaultdict(
            list
        )
        for position, acknowledgement in enumerate(acknowledgements):
            try:
                _check(acknowledgement)
                if acknowledgement.receipt in known:
                    raise InvalidRecordState("the receipt occurs twice in the request")
                known.add(acknowledgement.receipt)
                receipt = Receipt.decode(acknowledgement.receipt)
            except MansioError as error:
                results[position] = without_traceback(error)
                continue
            key = receipt.member_id, receipt.topic_id, receipt.partition
            by_partition[key].append((receipt, acknowledgement, position))
        works = [
            self._acknowledge_partition(group_id, members, results, caller)
            for members in by_partition.values()
        ]
        for raised in await gather_results(self._scheduler, works, name="acknowledge records"):
            if raised is not None:
                raise copied(raised)

    async def _acknowledge_partition(
        self,
        group_id: str,
        group: list[tuple[Receipt, Acknowledgement, int]],
        results: list[MansioError | None],
        caller: Caller,
    ) -> None:
        """Acknowledge records that one member has leased of one partition. The share partition takes the
        acknowledgements of a request all or none; if it refuses them, each is sent alone."""
        group.sort(key=lambda each: each[0].offset)
        error = await self._acknowledge(group_id, group, caller)
        if len(group) == 1 or not isinstance(error, InvalidRecordState | InvalidRequest):
            for _, _, position in group:
                results[position] = error
            return

        async def acknowledge_one(each: tuple[Receipt, Acknowledgement, int]) -> None:
            results[each[2]] = await self._acknowledge(group_id, [each], caller)

        at_once = len(group) if self._forwarder is None else FORWARDED_AT_ONCE_MAX
        for begin in range(0, len(group), at_once):
            works = [acknowledge_one(each) for each in group[begin : begin + at_once]]
            for raised in await gather_results(self._scheduler, works, name="acknowledge records one by one"):
                if raised is not None:
                    raise copied(raised)

    async def _acknowledge(
        self, group_id: str, group: Sequence[tuple[Receipt, Acknowledgement, int]], caller: Caller
    ) -> MansioError | None:
        receipt = group[0][0]
        if self._forwarder is not None:
            try:
                leader = self._forwarder.other_leader(receipt.topic_id, receipt.partition)
                if leader is not None:
                    return await self._forwarder.acknowledge(
                        leader,
                        group_id,
                        receipt.member_id,
                        receipt.topic_id,
                        receipt.partition,
                        _merge(group),
                        caller,
                    )
            except Unavailable as error:
                return without_traceback(error)
        part = PartitionAcknowledgements(receipt.topic_id, receipt.partition, _merge(group))
        try:
            (result,) = await self._share_service.acknowledge(
                group_id, receipt.member_id, [part], caller=caller
            )
        except AuthorizationFailed as error:  # the right was removed meanwhile
            return without_traceback(error)
        return result.error


def _check(acknowledgement: Acknowledgement) -> None:
    """Raise `InvalidRequest` if the kind, the delay or the reason is out of range."""
    if acknowledgement.kind not in (ACCEPT, RELEASE, REJECT, RENEW):
        raise InvalidRequest(
            f"a record is accepted, released, rejected or renewed, not {acknowledgement.kind}"
        )
    delay_ms_max = LEASE_MS_MAX if acknowledgement.kind == RENEW else REQUESTED_DELAY_MS_MAX
    if not -1 <= acknowledgement.delay_ms <= delay_ms_max:
        raise InvalidRequest(f"{acknowledgement.delay_ms} ms is not between 0 and {delay_ms_max} ms")
    if len(acknowledgement.reason) > REASON_CHARACTERS_MAX:
        raise InvalidRequest(f"a reason has at most {REASON_CHARACTERS_MAX} characters")


def _merge(group: Sequence[tuple[Receipt, Acknowledgement, int]]) -> list[AcknowledgementBatch]:
    """Return the acknowledgements of ascending offsets; adjacent ones of the same kind are one batch."""
    runs: list[Any] = []
    for receipt, acknowledgement, _ in group:
        details = (
            acknowledgement.kind,
            acknowledgement.delay_ms,
            acknowledgement.reason,
            receipt.delivery_count,
        )
        if runs and runs[-1][1] + 1 == receipt.offset and runs[-1][2] == details:
            runs[-1][1] = receipt.offset
        else:
            runs.append([receipt.offset, receipt.offset, details])
    return [
        AcknowledgementBatch(first, last, bytes([kind]), delay_ms, reason, delivery_count)
        for first, last, (kind, delay_ms, reason, delivery_count) in runs
    ]
