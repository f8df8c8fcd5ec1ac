"""Share sessions compared with a dictionary of the requests that each member may send next."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mansio.errors import (
    InvalidRequest,
    InvalidShareSessionEpoch,
    MansioError,
    ShareSessionLimitReached,
    ShareSessionNotFound,
)
from mansio.state.share_group.share_sessions import ShareSession, ShareSessions
from support.tiers import examples

LIMIT, ROOM = 3, 4
MEMBERS = st.sampled_from([("g", "a"), ("g", "b"), ("h", "a"), ("h", "c")])
CONNECTIONS = [object(), object()]
WHICH = st.sampled_from((0, 1))
PARTITIONS = st.lists(st.sampled_from([(b"t" * 16, index) for index in range(6)]), max_size=3, unique=True)


class SessionModel(RuleBasedStateMachine):
    """`open`: member -> [next epoch, partitions, connection]."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = ShareSessions(LIMIT, partitions_max=ROOM)
        self.open: dict[tuple[str, str], list] = {}

    def expected(self, who: tuple[str, str], epoch: int) -> type[MansioError] | None:
        """The error for a request that goes on with a session."""
        if who not in self.open:
            return ShareSessionNotFound
        return InvalidShareSessionEpoch if epoch not in (-1, self.open[who][0]) else None

    def done(self, who: tuple[str, str], epoch: int, connection: int) -> None:
        if epoch == -1:
            del self.open[who]
        else:
            self.open[who][0] = 1 if self.open[who][0] == 2**31 - 1 else self.open[who][0] + 1
            self.open[who][2] = connection

    @rule(
        who=MEMBERS,
        off=st.sampled_from((0, 0, 0, 1, -1)),
        add=PARTITIONS,
        forget=PARTITIONS,
        end=st.booleans(),
        connection=WHICH,
    )
    def fetch(
        self, who: tuple[str, str], off: int, add: list, forget: list, end: bool, connection: int
    ) -> None:
        epoch = -1 if end and off else max(self.open.get(who, [5])[0] + off, 1)
        error = self.expected(who, epoch)
        if error is None and epoch != -1 and len(self.open[who][1] | set(add)) > ROOM:
            error = InvalidRequest

        def call() -> ShareSession:
            return self.sessions.fetch(
                *who, epoch, add, forget, has_acks=True, connection=CONNECTIONS[connection]
            )

        if error:
            with pytest.raises(error):
                call()
            return
        session = call()
        if epoch != -1:
            self.open[who][1] = (self.open[who][1] - set(forget)) | set(add)
            turn = session.partitions()
            assert set(turn) == self.open[who][1]
            assert len(turn) < 2 or session.partitions()[0] != turn[0]
            assert not session.replaces_older
        self.done(who, epoch, connection)

    @rule(who=MEMBERS, add=PARTITIONS, has_acks=st.booleans(), connection=WHICH)
    def begin(self, who: tuple[str, str], add: list, has_acks: bool, connection: int) -> None:
        def call() -> ShareSession:
            return self.sessions.fetch(
                *who, 0, add, (), has_acks=has_acks, connection=CONNECTIONS[connection]
            )

        full = who not in self.open and len(self.open) == LIMIT
        if has_acks or full:
            with pytest.raises(InvalidRequest if has_acks else ShareSessionLimitReached):
                call()
            return
        assert call().replaces_older == (who in self.open)
        self.open[who] = [1, set(add), connection]

    @rule(who=MEMBERS, off=st.sampled_from((0, 0, 1, -1)), end=st.booleans(), connection=WHICH)
    def acknowledge(self, who: tuple[str, str], off: int, end: bool, connection: int) -> None:
        epoch = -1 if end and off else max(self.open.get(who, [0])[0] + off, 0)
        error = InvalidShareSessionEpoch if epoch == 0 else self.expected(who, epoch)
        if error:
            with pytest.raises(error):
                self.sessions.acknowledge(*who, epoch, connection=CONNECTIONS[connection])
            return
        self.sessions.acknowledge(*who, epoch, connection=CONNECTIONS[connection])
        self.done(who, epoch, connection)

    @rule(connection=WHICH)
    def connection_lost(self, connection: int) -> None:
        ended = {
            (each.group, each.member)
            for each in self.sessions.end_sessions_of_connection(CONNECTIONS[connection])
        }
        assert ended == {who for who, (_, _, over) in self.open.items() if over == connection}
        self.open = {who: each for who, each in self.open.items() if who not in ended}

    @rule(who=MEMBERS)
    def time_flies(self, who: tuple[str, str]) -> None:
        """So many requests that the epoch is at its end."""
        if who in self.open:
            self.sessions._sessions[who].epoch = self.open[who][0] = 2**31 - 1

    @invariant()
    def agrees(self) -> None:
        assert len(self.sessions) == len(self.open) <= LIMIT
        for who, (epoch, partitions, _) in self.open.items():
            session: ShareSession = self.sessions._sessions[who]
            assert (session.epoch, len(session)) == (epoch, len(partitions))
        assert not self.sessions.has_session("h", "b")
        assert all(self.sessions.has_session(*who) for who in self.open)


TestSessionModel = SessionModel.TestCase
TestSessionModel.settings = settings(max_examples=examples(20, 100, 5_000))


def test_full_session_may_name_its_partitions_again() -> None:
    """A member names the partitions whose records it acknowledges in every request."""
    sessions = ShareSessions(1, partitions_max=2, all_partitions_max=2)
    named = [(b"t" * 16, index) for index in range(2)]
    sessions.fetch("g", "a", 0, named, (), has_acks=False, connection=1)
    session = sessions.fetch("g", "a", 1, named, (), has_acks=True, connection=1)
    assert set(session.partitions()) == set(named)


def test_refused_request_leaves_the_session_as_it_was() -> None:
    sessions = ShareSessions(1)
    sessions.fetch("g", "a", 0, [(b"t" * 16, 0)], (), has_acks=False, connection=1)
    for epoch in (0, 2, 2**31 - 1):
        with suppress(InvalidRequest, InvalidShareSessionEpoch):
            sessions.fetch("g", "a", epoch, [(b"u" * 16, 0)], [(b"t" * 16, 0)], has_acks=True, connection=2)
    assert sessions.fetch("g", "a", 1, (), (), has_acks=True, connection=1).partitions() == [(b"t" * 16, 0)]
    assert sessions.end_sessions_of_connection(2) == []


def test_sessions_have_a_bound_of_partitions_together_and_give_room_back() -> None:
    sessions = ShareSessions(10, partitions_max=4, all_partitions_max=6)

    def fetch(member: str, epoch: int, *add: int, forget: tuple[int, ...] = ()) -> ShareSession:
        named, left_out = [(b"t" * 16, index) for index in add], [(b"t" * 16, index) for index in forget]
        return sessions.fetch(
            "g", member, epoch, named, left_out, has_acks=False, connection=CONNECTIONS[member == "b"]
        )

    fetch("a", 0, 0, 1, 2, 3)
    with pytest.raises(ShareSessionLimitReached):
        fetch("b", 0, 0, 1, 2)
    assert not sessions.has_session("g", "b")
    fetch("b", 0, 0, 1)
    with pytest.raises(ShareSessionLimitReached):
        fetch("b", 1, 2)
    fetch("a", 1, forget=(0, 1))
    fetch("b", 1, 2, 3)
    fetch("b", 0, 4)
    fetch("c", 0, 0, 1, 2)
    sessions.end("g", "c")
    sessions.end_sessions_of_connection(CONNECTIONS[True])
    fetch("d", 0, 0, 1, 2, 3)


def test_a_session_that_keeps_leases_releases_them_unless_its_connection_was_lost() -> None:
    sessions = ShareSessions(2)
    opened = sessions.fetch("g", "a", 0, (), (), has_acks=False, connection=1, keeps_leases=True)
    assert sessions.end_sessions_of_connection(1) == [opened]
    assert not opened.releases_leases
    sessions.fetch("g", "a", 0, (), (), has_acks=False, connection=2, keeps_leases=True)
    again = sessions.fetch("g", "a", 0, (), (), has_acks=False, connection=2, keeps_leases=True)
    assert again.replaces_older
    assert again.keeps_leases
    assert sessions.fetch("g", "a", -1, (), (), has_acks=False, connection=2).releases_leases
    plain = sessions.fetch("g", "b", 0, (), (), has_acks=False, connection=3)
    assert sessions.end_sessions_of_connection(3) == [plain]
    assert plain.releases_leases
