"""Facts of this broker about a group: the partitions that it leads, and clients that it has throttled or refused.

What changes is looked at twice, at the begin and at the end of the sample. Nothing is changed but what a look-up of
leases changes: the state of a share partition that is not in memory is loaded.

Invariants:
* The cost is bounded: `HEADERS_MAX` batch headers, and a bounded number of records in flight, for each partition, in
  turns of the event loop.
* A partition that cannot be looked at has its error; the others have their facts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from shlex import quote
from typing import TYPE_CHECKING, Final

from mansio.broker.features.delays.delay_manager import DelayManager
from mansio.broker.services.authorization import requester_of
from mansio.errors import GroupIdNotFound, MansioError
from mansio.host.gather_results import gather_results
from mansio.host.item_turns import ItemTurns
from mansio.state.authorization.acl_words import acl_text, adding_command, word_of
from mansio.state.authorization.acls import WILDCARD, Acl, Operation, PatternType, Permission
from mansio.state.blockage.broker_facts import BrokerFacts, PartitionReport
from mansio.state.blockage.facts import (
    UNKNOWN,
    HeldFacts,
    HolderFacts,
    LogFacts,
    OpenTransactionFacts,
    Place,
    RefusalFacts,
    RetriedFacts,
    ShareFacts,
    ShareOrder,
    ThrottleFacts,
    TransactionFacts,
)
from mansio.state.share_partition.types import merge_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mansio.broker.coordinator.share.dead_letter_manager import DeadLetterManager
    from mansio.broker.coordinator.share.partition_leader import SharePartitionLeader
    from mansio.broker.coordinator.share.share_partition_manager import SharePartitionManager
    from mansio.broker.coordinator.share.share_partitions import SharePartitions
    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.services.quotas import QuotaService
    from mansio.broker.services.recent_refusals import RecentRefusals
    from mansio.broker.services.transactions.transaction_service import TransactionService
    from mansio.ports import Clock, Scheduler
    from mansio.state.blockage.broker_facts import AskedPartition
    from mansio.state.quota import QuotaScope
    from mansio.state.share_partition.types import ShareSettings

PARTITIONS_MAX: Final = 10_000
"""Maximum number of partitions of a group that are looked at: the first ones."""

HEADERS_MAX: Final = 64
"""Maximum number of batches of one partition whose records are counted."""

HOLDERS_MAX: Final = 100
"""Maximum number of members with leases of one partition."""

SCHEDULES_MAX: Final = 10
"""Maximum number of paused schedules of one partition that are named."""

TRANSACTIONS_MAX: Final = 1_000
"""Maximum number of open transactions of one coordinator."""

REFUSALS_MAX: Final = 100
"""Maximum number of refusals."""

SAMPLE_MS_MAX: Final = 10_000
"""Maximum duration of a sample."""

_NO_MEMBER: Final = ""
"""Id of no member: for what one without leases could lease."""


@dataclass(slots=True)
class _Sample:
    """What changes in a partition: offset behind its records, and the number of records that the group has done."""

    end_offset: int
    done: int
    share: SharePartitions | None = None
    error: str = ""
    idle_ms: int = field(default=UNKNOWN)


class FactCollector:
    """Collects the facts of one broker. All methods run on its event loop."""

    def __init__(
        self,
        *,
        partitions: PartitionSet,
        shares: SharePartitionManager,
        dead_letters: DeadLetterManager,
        transactions: TransactionService,
        quotas: QuotaService,
        authorization: Authorization,
        refusals: RecentRefusals,
        is_hot: Callable[[Partition], bool],
        clock: Clock,
        scheduler: Scheduler,
    ) -> None:
        self._partitions = partitions
        self._shares = shares
        self._dead_letters = dead_letters
        self._transactions = transactions
        self._quotas = quotas
        self._authorization = authorization
        self._refusals = refusals
        self._is_hot = is_hot
        self._clock = clock
        self._scheduler = scheduler

    async def collect(
        self,
        group: str,
        led: Sequence[AskedPartition],
        places: Sequence[Place],
        *,
        is_share: bool,
        sample_ms: int,
    ) -> BrokerFacts:
        """Return the facts of this broker. `led`: partitions that it should lead; `places`: all of the group."""
        turns = ItemTurns(self._scheduler)
        before: dict[Place, _Sample] = {}

        async def sample(place: Place) -> None:
            before[place] = await self._sample(group, place, is_share=is_share)

        works = [sample(each.place) for each in led]
        await gather_results(self._scheduler, works, name="facts of a group", has_turns=True)
        throttles = {(each.user, each.client_id): each for each in self._throttles()}
        if sample_ms > 0:
            await self._scheduler.sleep(min(sample_ms, SAMPLE_MS_MAX))
            for throttle in self._throttles():
                throttles.setdefault((throttle.user, throttle.client_id), throttle)
        reports = []
        for each in led:
            await turns.next()
            reports.append(self._report(each, before[each.place], has_sample=sample_ms > 0))
        keys = [(each.topic, each.partition) for each in places]
        return BrokerFacts(
            reports,
            self._open_transactions(keys),
            list(throttles.values()),
            self._refused(group, {each.topic for each in places}),
        )

    # ------------------------------------------------------------------ partitions

    async def _sample(self, group: str, place: Place, *, is_share: bool) -> _Sample:
        try:
            partition = self._led(place)
            sample = _Sample(partition.high_watermark, 0)
            if is_share:
                try:
                    share = await self._shares.load_existing(
                        group, (partition.topic_id.bytes, place.partition)
                    )
                except GroupIdNotFound:
                    return sample  # it has read nothing of the partition
                sample.share = share
                asked_ms = max(each.asked_ms for each in share.leaders)
                sample.idle_ms = max(int(self._clock.monotonic() * 1000 - asked_ms), 0)
                sample.done = _done(share)
        except MansioError as error:
            return _Sample(0, 0, error=error.message)
        return sample

    def _report(self, asked: AskedPartition, before: _Sample, *, has_sample: bool) -> PartitionReport:
        place = asked.place
        try:
            if before.error:
                return PartitionReport(place, error=before.error)
            partition = self._led(place)
            share = None if before.share is None else self._share(before.share, before)
            position = asked.position
            if before.share is not None:
                position = max(each.state_machine.ranges.end for each in before.share.leaders)
            log = _log_facts(partition, position, self._clock.wall_ms(), is_hot=self._is_hot(partition))
            if has_sample:
                log = replace(log, appended=max(log.end_offset - before.end_offset, 0))
            if share is not None and before.share is not None and len(before.share.leaders) == 1:
                share = _without_control_records(share, log, position, is_committed=share.is_committed_only)
            return PartitionReport(place, log, share)
        except MansioError as error:
            return PartitionReport(place, error=error.message)

    def _led(self, place: Place) -> Partition:
        """Return a partition that this broker leads. Raises the errors of `PartitionSet.find`, and
        `NotLeaderOrFollower`."""
        partition = self._partitions.find(place.topic, None, place.partition)
        partition.ensure_leader()
        return partition

    def _share(self, shares: SharePartitions, before: _Sample) -> ShareFacts:
        leaders = shares.leaders
        for leader in leaders:
            leader.ensure_leader()
        counts = merge_counts([leader.counts() for leader in leaders])
        settings = leaders[0].state_machine.settings
        now_ms = leaders[0].now_ms()
        retried = max(
            filter(None, (leader.state_machine.most_retried(now_ms) for leader in leaders)),
            key=lambda each: (each.attempts, -each.offset),
            default=None,
        )
        held = max(
            filter(None, (leader.held_back() for leader in leaders)),
            key=lambda each: each[0].waiting,
            default=None,
        )
        limited = [leader.state_machine.limited_keys() for leader in leaders]
        holders = sorted(counts.holders, key=lambda each: -each.oldest_ms)[:HOLDERS_MAX]
        errors = (self._dead_letters.last_error_of(leader.key) for leader in leaders)
        return ShareFacts(
            lag=counts.lag,
            leased=counts.leased,
            in_backoff=counts.in_backoff,
            withheld=counts.withheld,
            archiving=counts.archiving,
            done=max(_done(shares) - before.done, 0),
            has_available=shares.has_available(_NO_MEMBER),
            waiting_receives=sum(leader.waiter_count for leader in leaders),
            idle_ms=before.idle_ms,
            record_locks_max=_record_locks_max(leaders, settings.record_locks_max),
            lock_ms=settings.lock_ms,
            delivery_limit=settings.delivery_limit,
            order=_order(settings),
            is_committed_only=settings.is_committed_only,
            holders=tuple(HolderFacts(each.member_id, each.leased, each.oldest_ms) for each in holders),
            retried=None
            if retried is None
            else RetriedFacts(retried.offset, retried.attempts, int(retried.due_ms)),
            held=None
            if held is None
            else HeldFacts(held[0].offset, held[0].waiting, held[0].total, held[1], held[0].is_complete),
            keys_at_lease_limit=sum(each.at_lease_limit for each in limited),
            keys_at_rate_limit=sum(each.at_rate_limit for each in limited),
            dead_letter_error=next(filter(None, errors), ""),
        )

    def _open_transactions(self, keys: Sequence[tuple[str, int]]) -> list[TransactionFacts]:
        now_ms = self._clock.wall_ms()
        return [
            TransactionFacts(transactional_id, producer_id, max(now_ms - started_ms, 0))
            for transactional_id, producer_id, started_ms in self._transactions.open_in(
                keys, TRANSACTIONS_MAX
            )
        ]

    # ------------------------------------------------------------------ clients

    def _throttles(self) -> list[ThrottleFacts]:
        active = self._quotas.active
        if active is None:
            return []
        return [
            ThrottleFacts(each.user, each.client_id, each.pause_ms, int(each.rate), _quota_words(each.scope))
            for each in active.throttled_readers()
        ]

    def _refused(self, group: str, topics: Iterable[str]) -> list[RefusalFacts]:
        """Return what clients were refused recently, and would be refused again now."""
        if not self._authorization.is_enabled:
            return []
        found: list[RefusalFacts] = []
        for each in self._refusals.of(group, frozenset(topics)):
            decision = self._authorization.decide(
                requester_of(each.caller), each.operation, each.resource_type, each.name
            )
            if decision.is_allowed:
                continue
            principal = each.caller.session.principal
            if decision.acl is None:
                missing = Acl(
                    each.resource_type,
                    PatternType.LITERAL,
                    each.name,
                    principal,
                    WILDCARD,
                    Operation.READ
                    if each.operation is Operation.DESCRIBE
                    else each.operation,  # READ implies it
                    Permission.ALLOW,
                )
                remedy, denied_by = adding_command(missing), ""
            else:
                resource = quote(f"{word_of(each.resource_type)}:{each.name}")
                remedy = (
                    f"mansio acl check {quote(each.caller.session.user)} {each.operation.name} {resource}"
                )
                denied_by = acl_text(decision.acl)
            found.append(
                RefusalFacts(
                    principal,
                    each.caller.client_id,
                    each.operation.name,
                    word_of(each.resource_type),
                    each.name,
                    each.ago_ms,
                    each.times,
                    remedy,
                    denied_by,
                )
            )
        return found[:REFUSALS_MAX]


def _record_locks_max(leaders: Sequence[SharePartitionLeader], locks_max: int) -> int:
    """Return the maximum number of leased records, 0 if range leases, which it does not limit, exceed it."""
    locked = sum(leader.state_machine.lock_count(is_range=False) for leader in leaders)
    leased = sum(leader.state_machine.leased_count for leader in leaders)
    return 0 if locked < locks_max <= leased else locks_max


def _done(shares: SharePartitions) -> int:
    """Return a number that increases with each record that the group has done."""
    return sum(leader.group_end() - leader.counts().lag for leader in shares.leaders)


def _order(settings: ShareSettings) -> ShareOrder:
    if settings.is_ordered:
        return ShareOrder.PARTITION
    return ShareOrder.KEY if settings.is_ordered_by_key else ShareOrder.NONE


def _quota_words(scope: QuotaScope) -> str:
    words = []
    if scope.user is not None:
        words += ["--user", quote(scope.user)]
    if scope.client_id is not None:
        words += ["--client", quote(scope.client_id)]
    return " ".join(words)


def _without_control_records(
    share: ShareFacts, log: LogFacts, position: int, *, is_committed: bool
) -> ShareFacts:
    """Return the facts of a share partition with a lag without the control records behind what was delivered."""
    end = log.stable_offset if is_committed else log.end_offset
    ahead = log.stable_records_ahead if is_committed else log.records_ahead
    if ahead < 0 or position > end:
        return share
    lag = max(share.lag - (end - position), 0) + ahead
    return replace(share, lag=lag, has_available=share.has_available and lag > share.leased)


def _log_facts(partition: Partition, position: int, wall_ms: int, *, is_hot: bool) -> LogFacts:
    end, stable = partition.high_watermark, partition.last_stable_offset
    ahead, stable_ahead = _records_ahead(partition, position, stable, end)
    delays = partition.find_feature(DelayManager)
    delayed, next_due_ms, schedules = 0, UNKNOWN, 0
    paused: tuple[str, ...] = ()
    if delays is not None and partition.is_leader:
        pending = delays.view.pending
        delayed = pending.count
        if pending.next_due_ms is not None:
            next_due_ms = max(pending.next_due_ms - wall_ms, 0)
        schedules = len(delays.view.schedules)
        if schedules:
            names = (each.name for each in delays.view.schedules if each.is_paused)
            paused = tuple(islice(names, SCHEDULES_MAX))
    return LogFacts(
        start_offset=partition.start_offset,
        stable_offset=stable,
        end_offset=end,
        records_ahead=ahead,
        stable_records_ahead=stable_ahead,
        transaction=_open_transaction(partition, stable, end, wall_ms),
        delayed=delayed,
        next_due_ms=next_due_ms,
        schedules=schedules,
        paused_schedules=paused,
        is_hot=is_hot,
    )


def _records_ahead(partition: Partition, position: int, stable: int, end: int) -> tuple[int, int]:
    """Return the number of records, without control records, between the position and `end`, and those below `stable`;
    `UNKNOWN` if there are more than `HEADERS_MAX` batches, or no position."""
    if position < 0:
        return UNKNOWN, UNKNOWN
    total = stable_count = 0
    headers = partition.log.batch_headers(position) if position < end else iter(())
    for number, header in enumerate(headers):
        if header.base_offset >= end:
            break
        if number >= HEADERS_MAX:
            return UNKNOWN, stable_count if header.base_offset >= stable else UNKNOWN
        if header.is_control:
            continue
        records = min(header.record_count, header.last_offset + 1 - max(position, header.base_offset))
        total += records
        if header.base_offset < stable:
            stable_count += records
    return total, stable_count


def _open_transaction(
    partition: Partition, stable: int, end: int, wall_ms: int
) -> OpenTransactionFacts | None:
    producers = partition.producers
    if producers is None or stable >= end:
        return None
    first = next(iter(producers.transactions.open.items()), None)
    if first is None:
        return None
    producer_id, offset = first
    header = next(partition.log.batch_headers(offset), None)
    began_ms = wall_ms if header is None else header.max_timestamp_ms
    return OpenTransactionFacts(offset, producer_id, max(wall_ms - began_ms, 0))
