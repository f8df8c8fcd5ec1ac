"""Handshakes begin in turn of their addresses, a flood of one address delays others by little, and memory is bounded,
for every order of events."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.state.handshake_admission import HandshakeAdmission, address_key
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

RUNNING_MAX: Final = 8
PER_ADDRESS_MAX: Final = 3
WAITING_MAX: Final = 12
TIME_S: Final = 5.0
PLACE_S: Final = 1.0

arrivals = st.tuples(st.just("arrive"), st.integers(0, 4))
speeches = st.tuples(st.just("send"), st.integers(0, WAITING_MAX - 1))
events = st.lists(
    st.one_of(
        arrivals,
        arrivals,
        speeches,
        speeches,
        st.tuples(st.just("begin"), st.just(0)),
        st.tuples(st.just("begin"), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, RUNNING_MAX - 1)),
        st.tuples(st.just("disconnect"), st.integers(0, WAITING_MAX - 1)),
        st.tuples(st.just("give way"), st.booleans()),
        st.tuples(st.just("pass time"), st.sampled_from((0.25, 0.5, 1.0, 4.0))),
    ),
    min_size=50,
    max_size=200,
)


class Waiting(NamedTuple):
    """A connection that waits. `since`: when it arrived; `expires_at`: when too little time remains."""

    number: int
    key: str
    since: float

    @property
    def expires_at(self) -> float:
        return self.since + TIME_S - PLACE_S


class Running(NamedTuple):
    """A connection that has a place since `since`."""

    number: int
    key: str
    since: float


class Model:
    """The rules as the documentation states them, by searching through lists."""

    def __init__(self) -> None:
        self.admission: HandshakeAdmission[int] = HandshakeAdmission(
            running_max=RUNNING_MAX,
            running_per_address_max=PER_ADDRESS_MAX,
            waiting_max=WAITING_MAX,
            handshake_ms=int(TIME_S * 1000),
            place_ms=int(PLACE_S * 1000),
        )
        self.now = 0.0
        self.arrived = 0
        self.waiting: list[Waiting] = []
        self.readable: list[int] = []
        """Waiting connections that have sent something, in this order."""
        self.running: list[Running] = []
        self.served_since: dict[str, Counter[str]] = {}
        """Address that may begin -> how often others began since it waits for its turn."""

    def running_of(self, key: str) -> int:
        return sum(each.key == key for each in self.running)

    def readable_of(self, key: str) -> list[int]:
        keys = {each.number: each.key for each in self.waiting}
        return [number for number in self.readable if keys[number] == key]

    def may_begin(self, running: list[Running] | None = None) -> set[str]:
        """Addresses of which a connection may begin now, or if only `running` had places."""
        running = self.running if running is None else running
        addresses = {each.key for each in self.waiting if each.number in self.readable}
        if len(running) >= RUNNING_MAX:
            return set()
        alone_max = RUNNING_MAX - PER_ADDRESS_MAX if len(addresses) == 1 else PER_ADDRESS_MAX
        return {key for key in addresses if sum(each.key == key for each in running) < alone_max}

    def remove(self, numbers: Iterable[int]) -> None:
        gone = set(numbers)
        self.waiting = [each for each in self.waiting if each.number not in gone]
        self.readable = [number for number in self.readable if number not in gone]

    def arrive(self, address: int) -> None:
        key = f"192.0.2.{address}"
        connection = self.arrived
        self.arrived += 1
        self.waiting.append(Waiting(connection, key, self.now))
        closed = self.admission.add(connection, key, self.now)
        if len(self.waiting) <= WAITING_MAX:
            assert closed is None
            return
        silent = [each for each in self.waiting if each.number not in self.readable]
        if silent[0].since + PLACE_S <= self.now:
            assert closed == silent[0].number
        else:
            counts = Counter(each.key for each in self.waiting)
            most = max(counts.values())
            newest = {each.key: each.number for each in self.waiting if counts[each.key] == most}
            assert closed in newest.values()
        self.remove([present(closed)])

    def send(self, place: int) -> None:
        silent = [each.number for each in self.waiting if each.number not in self.readable]
        if silent:
            connection = silent[place % len(silent)]
            self.readable.append(connection)
            self.admission.mark_readable(connection)

    def disconnect(self, place: int) -> None:
        if self.waiting:
            connection = self.waiting[place % len(self.waiting)].number
            self.admission.discard(connection)
            self.remove([connection])

    def begin(self) -> None:
        allowed = self.may_begin()
        connection = self.admission.begin_next(self.now)
        if connection is None:
            assert not allowed
            return
        key = next(each.key for each in self.waiting if each.number == connection)
        assert key in allowed
        assert connection == self.readable_of(key)[0]
        self.remove([connection])
        self.running.append(Running(connection, key, self.now))
        self.served_since = {
            other: self.served_since.get(other, Counter()) for other in allowed if other != key
        }
        for served in self.served_since.values():
            served[key] += 1
            assert served[key] <= 1, "another address waits for its turn"

    def end(self, place: int) -> None:
        if self.running:
            self.admission.end(self.running.pop(place % len(self.running)).number)

    def give_way(self, is_renewed: bool) -> None:
        while self.may_begin():
            self.begin()
        useful = [
            each
            for each in self.running
            if self.may_begin([other for other in self.running if other is not each])
        ]
        found = self.admission.next_to_give_way()
        if not useful:
            assert found is None
            return
        connection, time = present(found)
        oldest = next(each for each in useful if each.number == connection)
        assert oldest.since == min(each.since for each in useful)
        assert time == oldest.since + PLACE_S
        if is_renewed:
            self.admission.renew_place(connection, self.now)
            self.running.remove(oldest)
            self.running.append(Running(connection, oldest.key, self.now))
        elif time <= self.now:
            self.admission.end(connection)
            self.running.remove(oldest)
            assert self.may_begin()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        expired = [each.number for each in self.waiting if each.expires_at <= self.now]
        assert self.admission.take_expired(self.now) == expired
        self.remove(expired)

    def check(self) -> None:
        admission = self.admission
        waiting = {each.key for each in self.waiting if each.number in self.readable}
        for key in tuple(self.served_since):
            if key not in waiting or self.running_of(key) >= PER_ADDRESS_MAX:
                del self.served_since[key]  # it gives up its turn
        assert admission.running_count == len(self.running) <= RUNNING_MAX
        assert list(admission.waiting) == [each.number for each in self.waiting]
        assert admission.waiting_count == len(self.waiting) <= WAITING_MAX
        assert admission.next_expiry == min((each.expires_at for each in self.waiting), default=None)
        addresses = {each.key for each in self.waiting} | {each.key for each in self.running}
        assert len(admission._addresses) == len(addresses)
        assert len(admission._silent) == len(self.waiting) - len(self.readable)


@given(happened=events)
def test_admission_follows_its_rules_in_every_order_of_events(happened: list[tuple[str, Any]]) -> None:
    model = Model()
    actions: dict[str, Callable[[Any], None]] = {
        "arrive": model.arrive,
        "send": model.send,
        "begin": lambda _: model.begin(),
        "end": model.end,
        "disconnect": model.disconnect,
        "give way": model.give_way,
        "pass time": model.pass_time,
    }
    for event, value in happened:
        actions[event](value)
        model.check()
    model.pass_time(10)
    while model.running:
        model.end(0)
    model.check()
    assert not model.admission._turns
    assert not model.admission._at_limit
    assert not model.admission._addresses_by_waiting


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("::FFFF:c000:207", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2:ffff:ffff:ffff:ffff", "2001:db8:1:2::"),
        ("2001:db8:1:3::", "2001:db8:1:3::"),
        ("fe80::1%eth0", "fe80::"),
        ("::1", "::"),
        ("not: an address", "not: an address"),
        ("", ""),
    ],
)
def test_addresses_of_one_host_have_one_key(host: str, key: str) -> None:
    assert address_key(host) == key


class Scene:
    """The listeners of a broker in virtual time: one processor that computes handshakes, honest clients that try again
    when they are refused, and a flood. Connections of the flood send nothing (`silent`), or begin a handshake and do
    not go on (`stalled`)."""

    HANDSHAKE_S: Final = 0.0025
    ROUND_TRIP_S: Final = 0.05

    def __init__(self) -> None:
        self.admission: HandshakeAdmission[tuple[str, int]] = HandshakeAdmission()
        self.now = 0.0
        self.processor_free_at = 0.0
        self.events: list[tuple[float, int, str, tuple[str, int]]] = []
        self.numbers = 0
        self.accepted_at: dict[tuple[str, int], float] = {}
        self.done: dict[tuple[str, int], float] = {}
        self.waiting_most = 0
        self.looks_at = 0.0

    def plan(self, time: float, what: str, connection: tuple[str, int]) -> None:
        self.numbers += 1
        heapq.heappush(self.events, (time, self.numbers, what, connection))

    def refuse(self, connection: tuple[str, int]) -> None:
        if connection[0].startswith("honest"):
            self.plan(self.now + 0.1, "arrive", connection)

    def run_until(self, end: float) -> None:
        while self.events and self.events[0][0] <= end:
            self.now, _, what, connection = heapq.heappop(self.events)
            for expired in self.admission.take_expired(self.now):
                self.refuse(expired)
            if what == "arrive":
                self.accepted_at[connection] = self.now
                closed = self.admission.add(connection, connection[0], self.now)
                if closed is not None:
                    self.refuse(closed)
                if closed != connection and not connection[0].startswith("silent"):
                    self.plan(self.now + self.ROUND_TRIP_S, "send", connection)
                self.waiting_most = max(self.waiting_most, self.admission.waiting_count)
            elif what == "send":
                if connection in self.admission._silent:
                    self.admission.mark_readable(connection)
            elif what == "look" or connection not in self.admission._running:
                pass  # only so that handshakes begin, or it gave way before
            else:
                self.admission.end(connection)
                if what == "complete":
                    self.done[connection] = self.now
                else:
                    self.refuse(connection)
            self.begin()

    def begin(self) -> None:
        while True:
            begun = self.admission.begin_next(self.now)
            if begun is None:
                slowest = self.admission.next_to_give_way()
                if slowest is None:
                    return
                if slowest[1] > self.now:
                    if self.looks_at != slowest[1]:
                        self.looks_at = slowest[1]
                        self.plan(slowest[1], "look", slowest[0])
                    return
                self.admission.end(slowest[0])
                self.refuse(slowest[0])
                continue
            deadline = self.admission.deadline_of(self.accepted_at[begun])
            self.processor_free_at = max(self.processor_free_at, self.now) + self.HANDSHAKE_S
            complete = self.processor_free_at + self.ROUND_TRIP_S
            if begun[0].startswith("honest") and complete < deadline:
                self.plan(complete, "complete", begun)
            else:
                self.plan(max(deadline, self.now), "time out", begun)

    def delays_of_honest_clients(self, interval_s: float) -> list[float]:
        """Let a client of another address connect each `interval_s`; return how long each of them took."""
        begins = {("honest " + str(number), number): 1 + number * interval_s for number in range(100)}
        for connection, time in begins.items():
            self.plan(time, "arrive", connection)
        self.run_until(30)
        assert begins.keys() <= self.done.keys()
        return sorted(self.done[connection] - time for connection, time in begins.items())


def test_honest_clients_of_one_address_connect_beside_a_flood_that_sends_nothing() -> None:
    scene = Scene()
    for number in range(20_000):
        scene.plan(number * 0.001, "arrive", ("silent", number))
    for number in range(1000):
        scene.plan(1.0 + number * 0.0001, "arrive", ("honest", number))
    scene.run_until(30)
    assert len([connection for connection in scene.done if connection[0] == "honest"]) == 1000
    assert max(scene.done.values()) < 1.0 + 10
    assert scene.waiting_most <= 4096


@pytest.mark.parametrize(("kind", "addresses"), [("silent", 1), ("silent", 500), ("stalled", 1)])
def test_a_client_connects_at_once_beside_a_flood_of_other_addresses(kind: str, addresses: int) -> None:
    scene = Scene()
    for number in range(20_000):
        scene.plan(number * 0.001, "arrive", (f"{kind} {number % addresses}", number))
    assert scene.delays_of_honest_clients(0.15)[-1] < 0.2


def test_clients_connect_beside_handshakes_of_hundreds_of_addresses_that_do_not_go_on() -> None:
    scene = Scene()
    for number in range(4_000):
        scene.plan(number * 0.005, "arrive", (f"stalled {number % 200}", number))
    delays = scene.delays_of_honest_clients(0.15)
    assert delays[50] < 3.5
    assert delays[-1] < 7, "64 of 200 addresses give way each second"


def test_clients_of_thousands_of_addresses_are_not_kept_out_by_silent_ones() -> None:
    scene = Scene()
    for number in range(20_000):
        scene.plan(number * 0.0005, "arrive", (f"silent {number}", number))
    assert scene.delays_of_honest_clients(0.08)[-1] < 2
    assert scene.waiting_most <= 4096


def test_a_thousand_clients_of_one_address_reconnect_without_a_flood() -> None:
    scene = Scene()
    for number in range(1000):
        scene.plan(number * 0.0001, "arrive", ("honest", number))
    scene.run_until(30)
    assert len(scene.done) == 1000
    assert max(scene.done.values()) < 10
