"""Suspicions of killed brokers: what is needed to end a session early, and what can at most be ended, whatever brokers
see and in whatever order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.metadata.hand_over.suspicions import (
    ENDING_S_MAX,
    ENDINGS_APART_S,
    REFUSED_CONNECTS,
    Accusation,
    Suspicion,
    Suspicions,
)
from mansio.ports import ConnectOutcome, LinkChange

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

TTL_S: Final = 6.0
OPENED, CLOSED, LOST = LinkChange.OPENED, LinkChange.CLOSED, LinkChange.LOST
ACCEPTED, REFUSED, UNKNOWN = ConnectOutcome.ACCEPTED, ConnectOutcome.REFUSED, ConnectOutcome.UNKNOWN


class Seen:
    """What broker 1 sees of a cluster of brokers 1 to `count`, whose sessions have their node ids times 10 as epochs
    and have lasted for `age_s`. It has two connections to each other broker."""

    def __init__(self, count: int = 3, *, age_s: float = TTL_S) -> None:
        self.now = 100.0
        self.epochs = {node_id: 10 * node_id for node_id in range(1, count + 1)}
        self.active: Collection[int] = set(self.epochs)
        self.suspicions = Suspicions(1, TTL_S)
        self.update()
        self.now += age_s
        for node_id in range(2, count + 1):
            self.link(node_id, OPENED, OPENED)

    def update(self) -> None:
        self.suspicions.update(self.epochs, self.active, self.now)

    def link(self, node_id: int, *changes: LinkChange, apart_s: float = 0.0) -> Suspicion | None:
        found = None
        for change in changes:
            found = self.suspicions.record_link(node_id, change, self.now)
            self.now += apart_s
        return found

    def refuse(self, suspicion: Suspicion, outcomes: Iterable[ConnectOutcome] = (REFUSED,) * 3) -> None:
        for outcome in outcomes:
            self.suspicions.record_connect(suspicion, outcome)

    def suspected(self, node_id: int) -> Suspicion:
        """All connections end, and connects are refused."""
        suspicion = self.link(node_id, LOST, LOST)
        assert suspicion is not None
        self.refuse(suspicion)
        return suspicion

    def confirmers(self, suspicion: Suspicion) -> list[int]:
        return self.suspicions.confirmers(suspicion, self.now)

    def accusation(self, suspicion: Suspicion, confirmer: int) -> Accusation | None:
        return self.suspicions.accusation(suspicion, confirmer, self.now)


def test_broker_whose_connections_end_at_once_and_whose_host_refuses_is_accused() -> None:
    seen = Seen()
    suspicion = seen.link(3, LOST, LOST, apart_s=ENDING_S_MAX / 2)
    assert suspicion == Suspicion(3, 30)
    for _ in range(REFUSED_CONNECTS):
        assert seen.suspicions.wants_connect(suspicion)
        assert seen.confirmers(suspicion) == []
        seen.refuse(suspicion, [REFUSED])
    assert not seen.suspicions.wants_connect(suspicion)
    assert seen.confirmers(suspicion) == [2]
    assert seen.accusation(suspicion, 2) == Accusation(suspicion, ((1, 10), (2, 20)))
    assert seen.accusation(suspicion, 3) is None


@pytest.mark.parametrize(
    "outcomes", [[ACCEPTED], [UNKNOWN], [REFUSED, REFUSED, ACCEPTED], [REFUSED, UNKNOWN]]
)
def test_broker_that_accepts_one_connect_or_does_not_answer_it_is_not_accused(
    outcomes: list[ConnectOutcome],
) -> None:
    """A paused broker accepts, a broker that is cut off does not answer."""
    seen = Seen()
    suspicion = seen.link(3, LOST, LOST)
    assert suspicion is not None
    seen.refuse(suspicion, outcomes)
    assert not seen.suspicions.wants_connect(suspicion)
    seen.refuse(suspicion)
    assert seen.confirmers(suspicion) == []


def test_broker_is_suspected_only_if_all_connections_end_at_once_and_not_by_this_side() -> None:
    seen = Seen()
    assert seen.link(3, LOST) is None, "one is open"
    assert Seen().link(3, LOST, LOST, apart_s=ENDING_S_MAX * 1.1) is None
    assert Seen().link(3, LOST, CLOSED) is None
    seen = Seen()
    assert seen.link(3, CLOSED, LOST) == Suspicion(3, 30)


def test_connection_that_was_lost_long_ago_does_not_hide_a_death() -> None:
    seen = Seen()
    assert seen.link(3, LOST) is None
    seen.now += ENDINGS_APART_S * 1.1
    assert seen.link(3, LOST) == Suspicion(3, 30)


def test_suspicion_ends_with_an_open_connection() -> None:
    seen = Seen()
    suspicion = seen.suspected(3)
    seen.link(3, OPENED)
    assert seen.confirmers(suspicion) == []
    assert not seen.suspicions.may_confirm(suspicion)


def test_suspicion_ends_with_the_session_and_does_not_concern_the_next_one() -> None:
    seen = Seen()
    suspicion = seen.suspected(3)
    seen.epochs[3] = 31
    seen.update()
    assert seen.confirmers(suspicion) == []
    assert not seen.suspicions.may_confirm(suspicion)


def test_broker_that_is_stopping_is_not_accused() -> None:
    """It ends its session itself, after its listeners: meanwhile it finishes requests."""
    seen = Seen()
    suspicion = seen.suspected(3)
    seen.active = {1, 2}
    seen.update()
    assert seen.confirmers(suspicion) == []
    assert not seen.suspicions.may_confirm(suspicion)
    seen = Seen()
    seen.active = {1, 2}
    seen.update()
    assert seen.link(3, LOST, LOST) is None


def test_nothing_is_accused_in_a_cluster_of_two() -> None:
    seen = Seen(2)
    assert seen.confirmers(seen.suspected(2)) == []


def test_sessions_younger_than_a_lease_are_not_accused_and_their_brokers_are_no_witnesses() -> None:
    assert Seen(age_s=TTL_S * 0.99).link(3, LOST, LOST) is None
    for young in (1, 2):
        seen = Seen()
        seen.epochs[young] += 1
        seen.update()
        suspicion = seen.suspected(3)
        assert seen.confirmers(suspicion) == []
        seen.now += TTL_S
        assert seen.confirmers(suspicion) == [2]


def test_accuser_that_is_connected_to_less_than_a_majority_accuses_no_broker() -> None:
    """Half of the cluster is refused by the other half: neither half ends the sessions of the other one."""
    seen = Seen(4)
    first, second = seen.suspected(3), seen.suspected(4)
    assert seen.confirmers(first) == seen.confirmers(second) == []
    seen = Seen(5)
    suspicions = [seen.suspected(node_id) for node_id in (4, 5)]
    for suspicion in suspicions:
        assert seen.confirmers(suspicion) == [2, 3]
        accusation = seen.accusation(suspicion, 3)
        assert accusation is not None
        assert accusation.witnesses == ((1, 10), (3, 30), (2, 20))
    seen.link(2, LOST, LOST)
    assert seen.confirmers(suspicions[0]) == []


def test_broker_that_was_fenced_is_counted_for_the_time_of_a_lease() -> None:
    """Otherwise each session that ends would make the next one easier to end."""
    seen = Seen(5)
    suspicions = [seen.suspected(node_id) for node_id in (3, 4, 5)]
    assert [seen.confirmers(one) for one in suspicions] == [[], [], []]
    for node_id in (4, 5):
        del seen.epochs[node_id]
    seen.active = {1, 2, 3}
    seen.update()
    assert seen.confirmers(suspicions[0]) == []
    seen.now += TTL_S
    assert seen.confirmers(suspicions[0]) == [2]


def test_broker_confirms_only_while_it_has_no_connection_to_the_suspect() -> None:
    seen = Seen()
    assert not seen.suspicions.may_confirm(Suspicion(3, 30))
    seen.link(3, CLOSED, LOST)
    assert seen.suspicions.may_confirm(Suspicion(3, 30))
    assert not seen.suspicions.may_confirm(Suspicion(3, 29))
    assert not seen.suspicions.may_confirm(Suspicion(1, 10)), "it is running"
    assert not seen.suspicions.may_confirm(Suspicion(4, 0))


# Any number of brokers, in any order

BROKERS: Final = 5
brokers = st.integers(1, BROKERS)
events = st.lists(
    st.one_of(
        st.tuples(st.just("open"), brokers, brokers),
        st.tuples(st.just("open"), brokers, brokers),
        st.tuples(st.just("lose"), brokers, brokers),
        st.tuples(st.just("lose"), brokers, brokers),
        st.tuples(st.just("lose"), brokers, brokers),
        st.tuples(st.just("close"), brokers, brokers),
        st.tuples(st.just("refuse"), brokers, brokers),
        st.tuples(st.just("refuse"), brokers, brokers),
        st.tuples(st.just("accuse"), brokers, brokers),
        st.tuples(st.just("accuse"), brokers, brokers),
        st.tuples(st.just("accept"), brokers, brokers),
        st.tuples(st.just("register again"), brokers, brokers),
        st.tuples(st.just("fence"), brokers, brokers),
        st.tuples(st.just("learn"), brokers, brokers),
        st.tuples(st.just("pass time"), st.integers(1, 8), brokers),
    ),
    min_size=60,
    max_size=250,
)


class Accusers:
    """Brokers that accuse each other; `sessions` are those in etcd, of which each broker learns later."""

    def __init__(self) -> None:
        self.now = 0.0
        self.epoch = BROKERS
        self.sessions = {node_id: node_id for node_id in range(1, BROKERS + 1)}
        self.active = set(self.sessions)
        self.all = {node_id: Suspicions(node_id, TTL_S) for node_id in self.sessions}
        self.open = dict.fromkeys(((one, other) for one in self.all for other in self.all if one != other), 0)
        self.suspected: dict[tuple[int, int], Suspicion] = {}
        self.refused: dict[tuple[int, int], int] = {}
        self.ended: list[tuple[float, int]] = []
        for node_id in self.all:
            self.learn(node_id, 0)
        self.now = TTL_S
        for way in self.open:
            self._open(*way)

    def run(self, name: str, one: int, other: int) -> None:
        if name in ("pass time", "learn", "register again", "fence"):
            getattr(self, name.replace(" ", "_"))(one, other)
        elif one != other:
            getattr(self, f"_{name}")(one, other)

    def pass_time(self, steps: int, _: int) -> None:
        self.now += 0.05 * 2**steps

    def learn(self, node_id: int, _: int) -> None:
        self.all[node_id].update(self.sessions, self.active, self.now)

    def fence(self, node_id: int, _: int) -> None:
        if node_id not in self.sessions:
            self.active.discard(node_id)

    def register_again(self, node_id: int, _: int) -> None:
        if node_id not in self.sessions:
            self.epoch += 1
            self.sessions[node_id] = self.epoch
            self.active.add(node_id)

    def _link(self, one: int, other: int, change: LinkChange) -> None:
        self.open[one, other] += 1 if change is OPENED else -1
        suspicion = self.all[one].record_link(other, change, self.now)
        if change is OPENED:
            self.suspected.pop((one, other), None)
        if suspicion is not None:
            assert self.open[one, other] == 0
            self.suspected[one, other], self.refused[one, other] = suspicion, 0

    def _open(self, one: int, other: int) -> None:
        self._link(one, other, OPENED)

    def _close(self, one: int, other: int) -> None:
        if self.open[one, other]:
            self._link(one, other, CLOSED)

    def _lose(self, one: int, other: int) -> None:
        if self.open[one, other]:
            self._link(one, other, LOST)

    def _refuse(self, one: int, other: int) -> None:
        if (one, other) in self.suspected:
            self.all[one].record_connect(self.suspected[one, other], REFUSED)
            self.refused[one, other] += 1

    def _accept(self, one: int, other: int) -> None:
        if (one, other) in self.suspected:
            self.all[one].record_connect(self.suspected.pop((one, other)), ACCEPTED)

    def _accuse(self, one: int, other: int) -> None:
        suspicion = self.suspected.get((one, other))
        if suspicion is None:
            return
        for confirmer in self.all[one].confirmers(suspicion, self.now):
            assert self.refused[one, other] >= REFUSED_CONNECTS
            assert self.open[one, other] == 0
            assert self.open[one, confirmer] > 0
            if self.all[confirmer].may_confirm(suspicion):
                assert self.open[confirmer, other] == 0
                found = self.all[one].accusation(suspicion, confirmer, self.now)
                assert found is not None
                self._end(found)
                return

    def _end(self, accusation: Accusation) -> None:
        """The transaction."""
        (node_id, epoch), witnesses = accusation.suspicion, dict(accusation.witnesses)
        assert node_id not in witnesses
        required: dict[Any, Any] = {**witnesses, node_id: epoch}
        if required.items() <= self.sessions.items():
            del self.sessions[node_id]
            self.ended.append((self.now, node_id))


@given(events)
def test_within_a_lease_less_than_half_of_the_brokers_lose_their_sessions_to_each_other(
    history: list[tuple[str, int, int]],
) -> None:
    accusers = Accusers()
    for event in history:
        accusers.run(*event)
        recent = {node_id for at, node_id in accusers.ended if at > accusers.now - TTL_S}
        assert 2 * len(recent) < BROKERS


def test_that_property_is_not_empty() -> None:
    """All brokers are refused by all but their neighbours, and accuse each other: two lose their sessions, not five."""
    accusers = Accusers()
    near = {(one, one % BROKERS + 1) for one in accusers.all}
    far = [way for way in accusers.open if way not in near and way[::-1] not in near]
    for name in ("lose", "refuse", "refuse", "refuse", "accuse"):
        for way in far:
            accusers.run(name, *way)
    assert len(accusers.ended) == 2
    for node_id in accusers.all:
        accusers.register_again(node_id, 0)
        for each in accusers.all:
            accusers.learn(each, 0)
    for way in far:
        accusers.run("accuse", *way)
    assert len(accusers.ended) == 2
