"""Fetch sessions compared with a follower that sends all its partitions in each request: both get the same, and the
leader knows the same of both, whatever is lost, late, replaced or restarted."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from mansio.errors import (
    FetchSessionNotFound,
    FetchSessionTopicIdError,
    InvalidFetchSessionEpoch,
    MansioError,
    NotLeaderOrFollower,
)
from mansio.state.broker_handshake import BrokerIdentity
from mansio.state.fetch_session import (
    SESSIONS_PER_BROKER_MAX,
    UNUSED_MS_MIN,
    FetchSession,
    FetchSessions,
    FollowerFetchSession,
    next_epoch,
)
from mansio.state.replica import ReplicationProgress
from mansio.wire.apis.fetch import FetchPartition
from support.tiers import examples

PARTITIONS, LAG_MS = 4, 1000
LEADER, FOLLOWER = 1, 2
TOPIC_ID = b"t" * 16
INDEXES = st.integers(0, PARTITIONS - 1)
DELIVERED, LOST_REQUEST, LOST_RESPONSE, LATE_REQUEST = range(4)
EVENTS = st.sampled_from(
    ("",) * 8
    + (
        "trim",
        "flush",
        "flush",
        "elect",
        "learn_epoch",
        "fail",
        "reopen",
        "change_in_sync",
        "change_in_sync",
        "follow",
        "follow",
    )
    + ("deliver_late", "deliver_late", "forget_sessions", "evict", "restart", "give_sessions")
)
NOTHING: Final[dict[str, Any]] = {"error": None, "size_bytes": 0, "diverging": None}
OUTCOMES = st.sampled_from((*[DELIVERED] * 9, LOST_REQUEST, LOST_RESPONSE, LATE_REQUEST))


class Answered(NamedTuple):
    error: MansioError | None = None
    high_watermark: int = -1
    log_start_offset: int = -1
    size_bytes: int = 0
    diverging: tuple[int, int] | None = None


class WatchedWaits:
    """As `PartitionWaits`."""

    def __init__(self) -> None:
        self.followers: dict[Any, None] = {}
        self.marks: dict[Any, None] = {}

    def park_follower(self, wake: Any) -> None:
        self.followers[wake] = None

    def unpark_follower(self, wake: Any) -> None:
        self.followers.pop(wake, None)

    def add_mark(self, mark: Any) -> None:
        self.marks[mark] = None

    def remove_mark(self, mark: Any) -> None:
        self.marks.pop(mark, None)

    def wake(self) -> None:
        for wake in tuple(self.followers):
            wake()

    def mark(self) -> None:
        marks, self.marks = self.marks, {}
        for mark in marks:
            mark()


class Led:
    """A partition as its leader has it. `unabridged`: what the leader knows of a follower without sessions."""

    def __init__(self) -> None:
        self.epoch = 0
        self.end = self.start = 0
        self.fails = False
        self.waits = WatchedWaits()
        self.progress, self.unabridged = self.new_progress(0), self.new_progress(0)

    def new_progress(self, now_ms: float) -> ReplicationProgress:
        members = frozenset({LEADER, FOLLOWER})
        high_watermark = self.progress.high_watermark if self.epoch else 0
        return ReplicationProgress(
            LEADER, self.epoch, members, high_watermark, durable_end=self.end, replicas=members, now_ms=now_ms
        )

    def read(self, wanted: Any, *, limited: bool) -> Answered:
        if self.fails or wanted.current_leader_epoch != self.epoch:
            return Answered(NotLeaderOrFollower("not the leader"))
        if wanted.fetch_offset > self.end:
            return Answered(None, self.progress.high_watermark, self.start, 0, (self.epoch, self.end))
        size = 0 if limited else self.end - wanted.fetch_offset
        return Answered(None, self.progress.high_watermark, self.start, size)

    def report(self, broker_epoch: int, wanted: Any, now_ms: float) -> None:
        """What a follower with a session claims."""
        if self.fails or wanted.current_leader_epoch != self.epoch or wanted.fetch_offset > self.end:
            return
        known = self.progress.followers()[FOLLOWER]
        if wanted.fetch_offset < known.durable_end or wanted.log_start_offset < known.durable_start:
            self.waits.mark()
        if self._report(self.progress, broker_epoch, wanted, now_ms):
            self.waits.mark()

    def report_without_session(self, broker_epoch: int, wanted: Any, now_ms: float) -> None:
        if not self.fails and wanted.current_leader_epoch == self.epoch and wanted.fetch_offset <= self.end:
            self._report(self.unabridged, broker_epoch, wanted, now_ms)

    def _report(self, progress: ReplicationProgress, broker_epoch: int, wanted: Any, now_ms: float) -> bool:
        return progress.on_follower_fetch(
            FOLLOWER, broker_epoch, wanted.fetch_offset, self.end, now_ms, wanted.log_start_offset
        )


class Copy:
    """A partition as the follower has it. `is_followed`: not given up, not waiting to be retried."""

    def __init__(self) -> None:
        self.epoch = 0
        self.end = self.start = self.high_watermark = 0
        self.is_followed = True

    def position(self, index: int) -> FetchPartition:
        return FetchPartition(index, self.epoch, self.end, -1, self.start, 1)


class Request(NamedTuple):
    session_id: int
    epoch: int
    broker_epoch: int
    named: list[FetchPartition]
    forgotten: list[int]
    claimed: dict[int, FetchPartition]
    """All positions that the request confirms, named or not."""


class Exchange(RuleBasedStateMachine):
    """One leader and one follower."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0.0
        self.broker_epoch = 1
        self.led = [Led() for _ in range(PARTITIONS)]
        self.copies = [Copy() for _ in range(PARTITIONS)]
        self.sessions = FetchSessions(1)
        self.restarts = 1
        self.session: FollowerFetchSession[FetchPartition] = FollowerFetchSession()
        self.late: list[Request] = []
        self.sent: dict[tuple[int, int], tuple[int, int] | None] = {}
        """By session id and partition: high watermark and log start offset in the last response that had it."""
        self.removed_meanwhile: int | None = None

    @rule(
        event=EVENTS,
        index=INDEXES,
        switch=st.booleans(),
        appended=st.lists(INDEXES, max_size=2),
        elapsed_ms=st.sampled_from((0, 1, LAG_MS // 2, LAG_MS + 1)),
        outcomes=st.lists(OUTCOMES, min_size=1, max_size=4),
        removed_meanwhile=st.sampled_from((None, None, *range(PARTITIONS))),
        limited=st.booleans(),
    )
    def work(
        self,
        event: str,
        index: int,
        switch: bool,
        appended: list[int],
        elapsed_ms: int,
        outcomes: list[int],
        removed_meanwhile: int | None,
        limited: bool,
    ) -> None:
        """Something happens, records are appended, time passes, and the follower sends requests."""
        if event in ("fail", "change_in_sync", "follow"):
            getattr(self, event)(index, switch)
        elif event in ("trim", "flush", "elect", "reopen", "learn_epoch"):
            getattr(self, event)(index)
        elif event == "give_sessions":
            self.give_sessions(switch)
        elif event:
            getattr(self, event)()
        self.check_judgement()
        for each in appended:
            self.append(each, flushes=switch)
        self.now_ms += elapsed_ms
        self.check_judgement()
        self.removed_meanwhile = removed_meanwhile
        for number, outcome in enumerate(outcomes):
            self.exchange(outcome, limited and number == 0)
            self.check_judgement()

    # The leader

    def append(self, index: int, *, flushes: bool) -> None:
        led = self.led[index]
        led.end += 1
        led.waits.wake()
        if flushes:
            self.flush(index)

    def flush(self, index: int) -> None:
        """What the leader appended, maybe after the follower has flushed it."""
        led = self.led[index]
        advanced = [progress.on_local_flush(led.end) for progress in (led.progress, led.unabridged)]
        if advanced[0]:
            led.waits.mark()

    def trim(self, index: int) -> None:
        led = self.led[index]
        led.start = led.progress.high_watermark
        led.waits.wake()

    def elect(self, index: int) -> None:
        """The same leader, in a new epoch that the follower does not know."""
        led = self.led[index]
        led.epoch += 1
        led.progress, led.unabridged = led.new_progress(self.now_ms), led.new_progress(self.now_ms)
        led.waits.wake()

    def fail(self, index: int, fails: bool) -> None:
        led = self.led[index]
        led.fails = fails
        led.waits.wake()

    def reopen(self, index: int) -> None:
        led = self.led[index]
        led.waits.wake()
        led.waits = WatchedWaits()

    def change_in_sync(self, index: int, joins: bool) -> None:
        led = self.led[index]
        led.waits.mark()
        members = frozenset({LEADER, FOLLOWER}) if joins else frozenset({LEADER})
        advanced = [one.on_isr_committed(members, self.now_ms) for one in (led.progress, led.unabridged)]
        if advanced[0]:
            led.waits.mark()

    def forget_sessions(self) -> None:
        """As a restart does."""
        self.restarts += 1
        self.sessions = FetchSessions(self.restarts * 1000)
        for led in self.led:
            led.waits = WatchedWaits()
            led.unabridged.followers()[FOLLOWER].caught_up_ms = led.progress.followers()[
                FOLLOWER
            ].caught_up_ms
            led.unabridged.followers()[FOLLOWER].last_fetch_ms = led.progress.followers()[
                FOLLOWER
            ].last_fetch_ms

    def give_sessions(self, refused: bool) -> None:
        self.sessions.slots_max = 0 if refused else 10

    def evict(self) -> None:
        """Others need the room."""
        for session in list(self.sessions):
            self.sessions.begin(session.session_id, -1, session.owner, [], [], self.now_ms)

    # The follower

    def learn_epoch(self, index: int) -> None:
        copy = self.copies[index]
        copy.epoch = self.led[index].epoch
        self.session.forget((TOPIC_ID, index))
        copy.high_watermark = min(copy.high_watermark, copy.end)

    def follow(self, index: int, is_followed: bool) -> None:
        self.copies[index].is_followed = is_followed
        if not is_followed:
            self.session.forget((TOPIC_ID, index))

    def restart(self) -> None:
        self.sessions.end_all_of(BrokerIdentity(FOLLOWER, self.broker_epoch))
        self.broker_epoch += 1
        self.session = FollowerFetchSession()
        for copy in self.copies:
            copy.high_watermark = 0

    def deliver_late(self) -> None:
        if not self.late:
            return
        request = self.late.pop(0)
        if request.broker_epoch == self.broker_epoch:  # otherwise it is refused as a whole
            self.process(request, limited=False)

    def exchange(self, outcome: int, limited: bool) -> None:
        self.now_ms += 1
        request = self.next_request()
        if request is None:
            return
        if outcome in (LOST_REQUEST, LATE_REQUEST):
            if outcome == LATE_REQUEST:
                self.late.append(request)
            self.session.on_error(MansioError("lost"))
            return
        session_id, answers, error = self.process(request, limited=limited)
        if outcome == LOST_RESPONSE:
            self.session.on_error(MansioError("lost"))
        elif error is not None:
            assert request.epoch > 0, "a request that begins a session is accepted"
            self.session.on_error(error)
        else:
            self.session.on_response(session_id)
            self.apply(request, answers)

    def next_request(self) -> Request | None:
        """As `ReplicaFetcher`."""
        if self.session.is_full:
            self.session.restart()
        named = []
        for index, copy in enumerate(self.copies):
            if copy.is_followed and self.session.name((TOPIC_ID, index), copy.position(index)):
                named.append(copy.position(index))
        if not len(self.session):
            return None
        claimed = {index: copy.position(index) for index, copy in enumerate(self.copies) if copy.is_followed}
        assert len(claimed) == len(self.session)
        step = self.session.next_step()
        forgotten = [index for _, index in step.forgotten]
        assert not {*forgotten} & {one.index for one in named}
        return Request(step.session_id, step.epoch, self.broker_epoch, named, forgotten, claimed)

    def process(
        self, request: Request, *, limited: bool
    ) -> tuple[int, dict[int, Answered], MansioError | None]:
        """As `FetchService`: the session id, what the response has, and its error."""
        owner = BrokerIdentity(FOLLOWER, request.broker_epoch)
        topics = [(None, TOPIC_ID, request.named)]
        try:
            session = self.sessions.begin(
                request.session_id,
                request.epoch,
                owner,
                topics,
                [(None, TOPIC_ID, request.forgotten)],
                self.now_ms,
            )
        except MansioError as error:
            return 0, {}, error
        for index, position in request.claimed.items():
            self.led[index].report_without_session(request.broker_epoch, position, self.now_ms)
        wanted: Any = topics if session is None else session.wanted()
        read = []
        for _, _, partitions in wanted:
            for one in partitions:
                led = self.led[one.index]
                if session is not None and one.watched is not led.waits:
                    one.watch(led.waits)
                led.report(request.broker_epoch, one, self.now_ms)
                read.append(one.index)
                assert one.fetch_offset == request.claimed[one.index].fetch_offset
        if self.removed_meanwhile is not None:  # while the request waits
            self.change_in_sync(self.removed_meanwhile, False)
            self.removed_meanwhile = None
        answers = {}
        for number, index in enumerate(read):
            led = self.led[index]
            position = request.claimed[index]
            answer = led.read(position, limited=limited and number > 0)
            entry = None if session is None else session.partitions[TOPIC_ID, index]
            if entry is None or entry.record_answer(answer):
                answers[index] = answer
                if session is not None:
                    is_known = answer.error is None
                    self.sent[session.session_id, index] = answer[1:3] if is_known else None
            if entry is not None and entry.fetch_offset >= led.end and answer == answer._replace(**NOTHING):
                entry.record_agreement(led.progress.followers()[FOLLOWER])
        for index in request.claimed:
            known, other = (
                one.followers()[FOLLOWER] for one in (self.led[index].progress, self.led[index].unabridged)
            )
            assert (known.durable_end, known.durable_start) == (other.durable_end, other.durable_start)
        if session is not None and not limited:
            self.check_nothing_is_withheld(request, session, answers)
        return 0 if session is None else session.session_id, answers, None

    def check_nothing_is_withheld(
        self, request: Request, session: FetchSession, answers: dict[int, Answered]
    ) -> None:
        assert len(session) == len(request.claimed), "the session has what the follower has"
        assert {one.index for one in request.named} <= answers.keys(), "what is named is answered"
        for index, position in request.claimed.items():
            answer = self.led[index].read(position, limited=False)
            if index in answers:
                assert answers[index][1:] == answer[1:]
            else:
                assert answer.error is None
                assert (answer.size_bytes, answer.diverging) == (0, None)
                assert self.sent[session.session_id, index] == answer[1:3]

    def apply(self, request: Request, answers: dict[int, Answered]) -> None:
        for index, answer in answers.items():
            copy = self.copies[index]
            if request.claimed.get(index) != copy.position(index):
                continue
            if answer.error is not None:
                self.session.forget((TOPIC_ID, index))  # until it is retried
            elif answer.diverging is not None:
                copy.end = answer.diverging[1]
            else:
                copy.end += answer.size_bytes
                copy.high_watermark = answer.high_watermark
                copy.start = max(copy.start, min(answer.log_start_offset, copy.end))

    # What holds

    def check_judgement(self) -> None:
        """The leader judges a follower with a session as one without."""
        for led in self.led:
            assert led.progress.high_watermark == led.unabridged.high_watermark
            lagging = [
                one.lagging_replicas(self.now_ms, LAG_MS, led.end) for one in (led.progress, led.unabridged)
            ]
            assert lagging[0] == lagging[1]

    def teardown(self) -> None:
        """Without faults, the follower gets all that the leader has, and nothing is read of what does not change."""
        self.sessions.slots_max = 10
        for index, led in enumerate(self.led):
            self.fail(index, False)
            self.flush(index)
            self.learn_epoch(index)
            self.follow(index, True)
            assert led.end >= self.copies[index].end
        for _ in range(6):
            self.exchange(DELIVERED, False)
        for led, copy in zip(self.led, self.copies, strict=True):
            assert (copy.end, copy.high_watermark, copy.start) == (
                led.end,
                led.progress.high_watermark,
                led.start,
            )
        request = self.next_request()
        assert request is not None
        assert not request.named
        assert not request.forgotten
        owner = BrokerIdentity(FOLLOWER, self.broker_epoch)
        session = self.sessions.begin(request.session_id, request.epoch, owner, [], [], self.now_ms)
        assert session is not None
        assert len(session) == PARTITIONS
        assert not session.changed


Exchange.TestCase.settings = settings(max_examples=examples(100, 500), stateful_step_count=30, deadline=None)
TestFetchSessions = Exchange.TestCase


def wanted(*indexes: int, topic_id: bytes = TOPIC_ID) -> list:
    return [(None, topic_id, [FetchPartition(index, 0, 0, -1, 0, 1) for index in indexes])]


def created(sessions: FetchSessions, owner: BrokerIdentity, now_ms: float = 0) -> FetchSession:
    session = sessions.begin(0, 0, owner, wanted(0, 1), [], now_ms)
    assert session is not None
    return session


def test_a_session_is_found_by_its_owner_with_the_next_epoch_only() -> None:
    sessions, owner = FetchSessions(7), BrokerIdentity(2, 20)
    session = created(sessions, owner)
    assert session.session_id == 7
    for session_id, epoch, sender, error in (
        (8, 1, owner, FetchSessionNotFound),
        (7, 1, BrokerIdentity(3, 20), FetchSessionNotFound),
        (7, 1, BrokerIdentity(2, 21), FetchSessionNotFound),
        (7, 2, owner, InvalidFetchSessionEpoch),
    ):
        with pytest.raises(error):
            sessions.begin(session_id, epoch, sender, wanted(2), [], 1)
    with pytest.raises(FetchSessionTopicIdError):
        sessions.begin(7, 1, owner, [("t", None, wanted(2)[0][2])], [], 1)
    assert (session.epoch, len(session), session.requested_ms) == (1, 2, 0), (
        "a refused request changes nothing"
    )
    assert sessions.begin(7, 1, owner, wanted(2), [(None, TOPIC_ID, [0])], 1) is session
    assert (session.epoch, len(session), session.requested_ms) == (2, 2, 1)
    with pytest.raises(InvalidFetchSessionEpoch):
        sessions.begin(7, 1, owner, [], [], 1)


@pytest.mark.parametrize("epoch", [0, -1])
def test_a_request_for_all_partitions_ends_the_session_that_it_names(epoch: int) -> None:
    sessions, owner = FetchSessions(7), BrokerIdentity(2, 20)
    created(sessions, owner)
    other = sessions.begin(7, epoch, BrokerIdentity(3, 1), wanted(0), [], 0)
    assert any(one.session_id == 7 for one in sessions), "that of another broker"
    sessions.begin(7, epoch, owner, wanted(0), [], 0)
    assert [one.session_id for one in sessions] == ([8, 9] if epoch == 0 else [])
    assert (other is None) == (epoch == -1)


def test_a_broker_has_so_many_sessions_and_none_of_an_earlier_process() -> None:
    sessions, owner = FetchSessions(1), BrokerIdentity(2, 20)
    first = [created(sessions, owner).session_id for _ in range(SESSIONS_PER_BROKER_MAX)]
    sessions.begin(first[0], 1, owner, [], [], 1)
    third = created(sessions, owner)
    assert [one.session_id for one in sessions] == [first[0], third.session_id]
    assert sessions.eviction_count == 1
    other = created(sessions, BrokerIdentity(3, 30))
    later = created(sessions, BrokerIdentity(2, 21))
    sessions.end_all_of(owner)
    assert [*sessions] == [other, later]
    assert sessions.eviction_count == 1, "it was not for want of room"


def test_a_full_cache_gives_up_only_a_session_that_is_not_used() -> None:
    sessions = FetchSessions(1, slots_max=1)
    session = created(sessions, BrokerIdentity(2, 20))
    assert sessions.begin(0, 0, BrokerIdentity(3, 30), wanted(0), [], UNUSED_MS_MIN - 1) is None
    assert [*sessions] == [session]
    created(sessions, BrokerIdentity(3, 30), UNUSED_MS_MIN)
    assert len(sessions) == sessions.eviction_count == 1


def test_a_session_has_so_many_partitions_at_most() -> None:
    sessions, owner = FetchSessions(1, partitions_max=2), BrokerIdentity(2, 20)
    assert sessions.begin(0, 0, owner, wanted(0, 1, 2), [], 0) is None
    session = created(sessions, owner)
    assert sessions.begin(session.session_id, 1, owner, wanted(2), [(None, TOPIC_ID, [0])], 0) is session
    with pytest.raises(FetchSessionNotFound):
        sessions.begin(session.session_id, 2, owner, wanted(3), [], 0)
    assert not len(sessions)


def test_a_request_that_waits_is_rejected_when_its_session_ends_or_has_a_newer_request() -> None:
    class Waiter:
        def __init__(self) -> None:
            self.errors: list[MansioError] = []

        def wake(self) -> None:
            raise AssertionError

        def reject(self, error: MansioError) -> None:
            self.errors.append(error)

    sessions, owner = FetchSessions(1), BrokerIdentity(2, 20)
    session = created(sessions, owner)
    waiters = [Waiter(), Waiter()]
    session.wait(waiters[0])
    sessions.begin(1, 1, owner, [], [], 0)
    session.wait(waiters[1])
    sessions.end_all_of(owner)
    errors = [type(one) for waiter in waiters for one in waiter.errors]
    assert errors == [InvalidFetchSessionEpoch, FetchSessionNotFound]


def test_the_epoch_after_the_largest_is_1() -> None:
    assert [next_epoch(each) for each in (0, 1, 2**31 - 2, 2**31 - 1)] == [1, 2, 2**31 - 1, 1]
