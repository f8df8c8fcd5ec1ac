"""The usual request of a member of a share group: accept leased records and lease the next ones, in one step.

    plan_exchange ── something is not usual ──► None: the general path processes the request
          │
          └──► ShareExchange.start: changes the share partitions ──► their updates are stored ──► complete

A request is processed here without a task and without a promise, because nothing in it waits but its writes. It is
planned first, which changes nothing, so that a request about which something is not usual can be left to the general
path (`ShareService.apply_acknowledgements` and `ReceiveOperation.run`). Both give the same results, but for a request
whose only leases cannot be stored now: it is answered without records, and does not wait for others.

Invariants: those of `services.share_groups.share`. A plan is carried out in the iteration of the event loop in which it
was made. An exchange completes once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mansio.broker.services.share_groups.share import TRANSIENT_ERRORS, AcknowledgeResult, ReceivedPartition
from mansio.errors import MansioError
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mansio.broker.coordinator.share.partition_leader import PlannedExchange
    from mansio.broker.coordinator.share.share_partition_manager import SharePartitionManager
    from mansio.state.share_partition.types import AcquiredRange
    from mansio.wire.topic_partition import TopicIdPartition

    Accepted = tuple[TopicIdPartition, Sequence[tuple[int, int]]]
    """A partition, and the ranges of its records (first, last) that are accepted."""


EMPTY_CANDIDATES_MAX: Final = 4
"""Number of partitions without records that are searched before the general path, which searches all of them."""


class ShareExchange:
    """One request. `response` is for the caller, so that it needs no object of its own per request."""

    __slots__ = (
        "_acquired",
        "_errors",
        "_has_started",
        "_on_done",
        "_plans",
        "_unstored",
        "lock_ms",
        "response",
    )

    def __init__(self, plans: Sequence[PlannedExchange], on_done: Callable[[ShareExchange], None]) -> None:
        self._plans = plans
        self._acquired: list[Sequence[AcquiredRange]] = []
        self._errors: list[MansioError | None] = [None] * len(plans)
        self._unstored = len(plans)
        self._has_started = False
        self._on_done = on_done
        self.lock_ms = 0
        """Duration of the leases in milliseconds."""
        self.response: Any = None

    @property
    def is_complete(self) -> bool:
        """Whether all changes are stored, or have failed."""
        return not self._unstored

    def start(self, member_id: str, lease_ms: int) -> None:
        """Change the share partitions, and begin to store the changes. `on_done` is called when they are stored, unless
        they are when this returns."""
        for number, plan in enumerate(self._plans):
            leader = plan.leader
            if not self.lock_ms or plan.leased is not None:
                is_chosen = plan.leased is not None and lease_ms >= 0
                self.lock_ms = lease_ms if is_chosen else leader.state_machine.settings.lock_ms
            try:
                acquired, update = leader.exchange(plan, member_id, lease_ms)
            except MansioError as error:  # a defect, which has ended the leader
                self._acquired.append(())
                self._on_stored(number, error)
                continue
            self._acquired.append(acquired)
            leader.store((update,), partial(self._on_stored, number))
        self._has_started = True

    def _on_stored(self, number: int, error: MansioError | None) -> None:
        self._errors[number] = without_traceback(error)
        self._unstored -= 1
        if not self._unstored and self._has_started:
            self._on_done(self)

    def usual_result(self) -> tuple[PlannedExchange, AcquiredRange] | None:
        """Return the only plan and the only leased range, if there is one of each and their update is stored. None:
        see `results`."""
        if len(self._plans) != 1 or self._errors[0] is not None or len(self._acquired[0]) != 1:
            return None
        try:
            self._plans[0].leader.ensure_leader()
        except MansioError:
            return None
        return self._plans[0], self._acquired[0][0]

    def results(self) -> tuple[Mapping[TopicIdPartition, ReceivedPartition], list[AcknowledgeResult]]:
        """Return the leased records by partition, and the results of the acknowledgements, as the general path does."""
        received: dict[TopicIdPartition, ReceivedPartition] = {}
        accepted: list[AcknowledgeResult] = []
        for plan, acquired, error in zip(self._plans, self._acquired, self._errors, strict=True):
            leader = plan.leader
            key = leader.key
            if plan.accepted:
                accepted.append(AcknowledgeResult(key.topic_id, key.partition, error, leader))
            if not acquired or plan.records is None:
                continue
            try:
                if error is not None:
                    raise copied(error)
                leader.ensure_leader()
            except MansioError as refused:
                if not isinstance(refused, TRANSIENT_ERRORS):
                    received[key.topic_id, key.partition] = ReceivedPartition(without_traceback(refused))
            else:
                received[key.topic_id, key.partition] = ReceivedPartition(
                    None, acquired, (plan.records,), plan.records.length
                )
        return received, accepted

    def respond(self, response: Any) -> None:
        """Set the response."""
        self.response = response


def plan_exchange(
    manager: SharePartitionManager,
    group_id: str,
    member_id: str,
    accepted: Accepted | None,
    candidates: Sequence[TopicIdPartition],
    *,
    max_records: int,
    max_bytes: int,
    strict: bool,
) -> list[PlannedExchange] | None:
    """Plan to accept records of one partition, and to lease records of the first of the partitions `candidates` that
    has any; without candidates the member wants none. Changes no state of a record. Returns None if the general path
    has to process the request. The other arguments are those of `ReceiveOperation`."""
    planned: list[PlannedExchange] = []
    place, ranges = (None, ()) if accepted is None else accepted
    try:
        for number, candidate in enumerate(candidates):
            shares = manager.find(group_id, candidate)
            if shares.index is not None or not (shares.is_loaded or shares.check_loaded()):
                return None
            plan = shares.leaders[0].plan_exchange(
                member_id,
                ranges if candidate == place else (),
                max_records,
                max_bytes,
                strict=strict,
            )
            if plan is None:
                return None
            if plan.leased is None:
                if number + 1 >= EMPTY_CANDIDATES_MAX and number + 1 < len(candidates):
                    return None
            else:
                if plan.leased[1] - plan.leased[0] + 1 < max_records and number + 1 < len(candidates):
                    return None  # other partitions may have the rest
                planned.append(plan)
                if candidate == place:
                    return planned
                break
        if place is None:
            return planned or None
        shares = manager.find(group_id, place)
        if shares.index is not None or not (shares.is_loaded or shares.check_loaded()):
            return None
    except MansioError:
        return None
    plan = shares.leaders[0].plan_exchange(member_id, ranges, 0, 0, strict=strict)
    if plan is None:
        return None
    planned.append(plan)
    return planned
