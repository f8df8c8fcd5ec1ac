"""Handshakes begin in turn of their addresses, a flood of one address delays others by little, and memory is bounded,
for every order of events."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.state.handshake_admission import HandshakeAdmission, address_key

RUNNING_MAX: Final = 8
PER_ADDRESS_MAX: Final = 3
WAITING_MAX: Final = 12
TIME_S: Final = 5.0

arrivals = st.tuples(st.just("arrive"), st.integers(0, 4))
events = st.lists(
    st.one_of(
        arrivals,
        arrivals,
        st.tuples(st.just("begin"), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, RUNNING_MAX - 1)),
        st.tuples(st.just("pass time"), st.integers(0, 4)),
    ),
    min_size=50,
    max_size=200,
)


class Model:
    """The rules as the documentation states them, by searching through lists."""

    def __init__(self) -> None:
        self.admission: HandshakeAdmission[int] = HandshakeAdmission(
            running_max=RUNNING_MAX,
            running_per_address_max=PER_ADDRESS_MAX,
            waiting_max=WAITING_MAX,
            handshake_ms=int(TIME_S * 1000),
        )
        self.now = 0.0
        self.arrived = 0
        self.waiting: list[tuple[int, str, float]] = []
        self.running: list[tuple[int, str]] = []
        self.served_since: dict[str, Counter[str]] = {}
        """Address that may begin -> how often others began since it waits for its turn."""

    def running_of(self, key: str) -> int:
        return sum(other == key for _, other in self.running)

    def may_begin(self) -> set[str]:
        """Addresses of which a connection may begin now."""
        addresses = {key for _, key, _ in self.waiting}
        if len(self.running) >= RUNNING_MAX:
            return set()
        alone_max = RUNNING_MAX - PER_ADDRESS_MAX if len(addresses) == 1 else PER_ADDRESS_MAX
        return {key for key in addresses if self.running_of(key) < alone_max}

    def arrive(self, address: int) -> None:
        key = f"192.0.2.{address}"
        connection = self.arrived
        self.arrived += 1
        self.waiting.append((connection, key, self.now + TIME_S))
        closed = self.admission.add(connection, key, self.now)
        if len(self.waiting) <= WAITING_MAX:
            assert closed is None
            return
        counts = Counter(key for _, key, _ in self.waiting)
        most = max(counts.values())
        newest = {key: number for number, key, _ in self.waiting if counts[key] == most}
        assert closed in newest.values()
        self.waiting = [entry for entry in self.waiting if entry[0] != closed]

    def begin(self) -> None:
        allowed = self.may_begin()
        connection = self.admission.begin_next()
        if connection is None:
            assert not allowed
            return
        key, oldest = next((key, number) for number, key, _ in self.waiting if number == connection)
        assert key in allowed
        assert oldest == min(number for number, other, _ in self.waiting if other == key)
        self.waiting = [entry for entry in self.waiting if entry[0] != connection]
        self.running.append((connection, key))
        self.served_since = {
            other: self.served_since.get(other, Counter()) for other in allowed if other != key
        }
        for served in self.served_since.values():
            served[key] += 1
            assert served[key] <= 1, "another address waits for its turn"

    def end(self, place: int) -> None:
        if self.running:
            connection, _ = self.running.pop(place % len(self.running))
            self.admission.end(connection)

    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        expired = [number for number, _, deadline in self.waiting if deadline <= self.now]
        assert self.admission.take_expired(self.now) == expired
        self.waiting = [entry for entry in self.waiting if entry[0] not in expired]

    def check(self) -> None:
        admission = self.admission
        waiting = {key for _, key, _ in self.waiting}
        for key in tuple(self.served_since):
            if key not in waiting or self.running_of(key) >= PER_ADDRESS_MAX:
                del self.served_since[key]  # it gives up its turn
        assert admission.running_count == len(self.running) <= RUNNING_MAX
        assert admission.waiting_count == len(self.waiting) <= WAITING_MAX
        assert admission.next_deadline == min((deadline for _, _, deadline in self.waiting), default=None)
        assert len(admission._addresses) == len({key for _, key, *_ in (*self.waiting, *self.running)})


@given(happened=events)
def test_admission_follows_its_rules_in_every_order_of_events(happened: list[tuple[str, int]]) -> None:
    model = Model()
    for event, value in happened:
        if event == "arrive":
            model.arrive(value)
        elif event == "begin":
            model.begin()
        elif event == "end":
            model.end(value)
        else:
            model.pass_time(value)
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
    """A listener in virtual time: one processor that computes handshakes, honest clients that try again when they are
    refused, and a flood of connections that send nothing."""

    HANDSHAKE_S: Final = 0.0025
    ROUND_TRIP_S: Final = 0.05

    def __init__(self) -> None:
        self.admission: HandshakeAdmission[tuple[str, int]] = HandshakeAdmission()
        self.now = 0.0
        self.processor_free_at = 0.0
        self.events: list[tuple[float, int, str, tuple[str, int]]] = []
        self.numbers = 0
        self.attempts: Counter[tuple[str, int]] = Counter()
        self.accepted_at: dict[tuple[str, int], float] = {}
        self.done: dict[tuple[str, int], float] = {}
        self.waiting_most = 0

    def plan(self, time: float, what: str, connection: tuple[str, int]) -> None:
        self.numbers += 1
        heapq.heappush(self.events, (time, self.numbers, what, connection))

    def refuse(self, connection: tuple[str, int]) -> None:
        if connection[0] != "flood":
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
                self.waiting_most = max(self.waiting_most, self.admission.waiting_count)
            else:
                self.admission.end(connection)
                if what == "complete":
                    self.done[connection] = self.now
                else:
                    self.refuse(connection)
            while (begun := self.admission.begin_next()) is not None:
                deadline = self.admission.deadline_of(self.accepted_at[begun])
                if begun[0] == "flood":
                    self.plan(max(deadline, self.now), "time out", begun)
                    continue
                self.processor_free_at = max(self.processor_free_at, self.now) + self.HANDSHAKE_S
                complete = self.processor_free_at + self.ROUND_TRIP_S
                self.plan(min(complete, deadline), "complete" if complete < deadline else "time out", begun)


def test_honest_clients_of_one_address_connect_beside_a_flood_that_sends_nothing() -> None:
    scene = Scene()
    for number in range(20_000):
        scene.plan(number * 0.001, "arrive", ("flood", number))
    for number in range(1000):
        scene.plan(1.0 + number * 0.0001, "arrive", ("honest", number))
    scene.run_until(30)
    assert len(scene.done) == 1000
    assert max(scene.done.values()) < 1.0 + 15
    assert scene.waiting_most <= 4096


def test_a_client_connects_at_once_beside_a_flood_of_another_address() -> None:
    scene = Scene()
    for number in range(20_000):
        scene.plan(number * 0.001, "arrive", ("flood", number))
    for number in range(100):
        scene.plan(0.5 + number * 0.15, "arrive", (f"honest {number}", number))
    scene.run_until(30)
    late = {
        connection: scene.done[connection] - (0.5 + connection[1] * 0.15)
        for connection in scene.done
        if connection[0] != "flood"
    }
    assert len(late) == 100
    assert max(late.values()) < 0.1


def test_a_thousand_clients_of_one_address_reconnect_without_a_flood() -> None:
    scene = Scene()
    for number in range(1000):
        scene.plan(number * 0.0001, "arrive", ("honest", number))
    scene.run_until(30)
    assert len(scene.done) == 1000
    assert max(scene.done.values()) < 10
