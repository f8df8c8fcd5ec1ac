"""The checks of passwords: one at a time, a bounded queue, accepted ones remembered, wrong ones limited by address."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.services.password_checks import (
    CACHE_S,
    QUEUE_FULL,
    QUEUE_MAX,
    PasswordChecker,
)
from mansio.broker.services.wrong_credentials import TOO_MANY_WRONG, WRONG_PER_S_MAX, network_of
from mansio.state.authentication.credentials import CredentialDirectory, ScramCredential, ScramMechanism
from mansio.state.authentication.outcomes import Accepted, Refused, Rejected
from mansio.state.authentication.plain import PasswordCheck
from support.credentials import SERVER_SECRET, credential

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.services.password_checks import Outcome

HERE, THERE = "10.0.0.1", "10.0.0.2"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def monotonic(self) -> float:
        return self.now_s

    def wall_ms(self) -> int:
        return int(self.now_s * 1000)


class Thread:
    """Runs a job when the test calls `step`."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[..., None]]] = []

    def submit(self, work: Callable[[], Any], done: Callable[..., None]) -> None:
        self.jobs.append((work, done))

    def step(self) -> None:
        assert len(self.jobs) == 1, "one at a time"
        work, done = self.jobs.pop()
        done(work(), None)

    def close(self) -> None:
        pass


class Random:
    def bytes(self, length: int) -> bytes:
        return bytes(range(length))

    def uniform(self, low: float, high: float) -> float:
        return (low + high) / 2


class Bench:
    """A checker whose users are a dictionary; the outcomes in the order of their arrival."""

    def __init__(self) -> None:
        self.clock, self.thread = Clock(), Thread()
        self.checker = PasswordChecker(self.thread, self.clock, Random())
        self.users: dict[str, ScramCredential] = {"alice": replace(credential("right"), revision=1)}
        self.directory = CredentialDirectory(self._find, SERVER_SECRET)
        self.outcomes: list[Outcome] = []
        self.is_wanted = True

    def _find(self, user: str, mechanism: ScramMechanism) -> ScramCredential | None:
        return self.users.get(user) if mechanism is ScramMechanism.SHA_256 else None

    def begin(self, password: str, address: str = HERE, user: str = "alice") -> Outcome | None:
        check = PasswordCheck(user, password.encode(), self.directory)
        return self.checker.begin(check, address, self.outcomes.append, lambda: self.is_wanted)

    def run(self, password: str, address: str = HERE, user: str = "alice") -> Outcome:
        found = self.begin(password, address, user)
        if found is not None:
            return found
        self.thread.step()
        return self.outcomes.pop()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_accepted_password_is_remembered_for_a_minute_and_a_wrong_one_never(bench: Bench) -> None:
    assert isinstance(bench.run("right"), Accepted)
    assert isinstance(bench.begin("right", THERE), Accepted), "from any address"
    bench.clock.now_s += CACHE_S - 1
    assert isinstance(bench.begin("right"), Accepted)
    bench.clock.now_s += 1
    assert bench.begin("right") is None, "checked again"
    bench.thread.step()
    for _ in range(2):
        assert bench.run("wrong") == Rejected("wrong password", "alice")
    assert bench.checker.run_count == 4


def test_a_changed_or_deleted_credential_is_not_remembered(bench: Bench) -> None:
    assert isinstance(bench.run("right"), Accepted)
    bench.users["alice"] = replace(credential("right"), revision=2)
    assert bench.begin("right") is None, "the same password, set again"
    bench.thread.step()
    del bench.users["alice"]
    assert bench.run("right") == Rejected("unknown user", "alice")


def test_a_previous_password_is_remembered_until_its_end_only(bench: Bench) -> None:
    end_ms = bench.clock.wall_ms() + 5_000
    bench.users["alice"] = replace(bench.users["alice"].with_password("new", end_ms), revision=2)
    outcome = bench.run("right")
    assert outcome == Accepted("alice", revision=1, valid_until_ms=end_ms)
    bench.clock.now_s += 4.9
    assert bench.begin("right") == outcome
    bench.clock.now_s += 0.1
    assert bench.run("right") == Rejected("wrong password", "alice")


def test_checks_run_one_at_a_time_and_a_full_queue_refuses(bench: Bench) -> None:
    for number in range(QUEUE_MAX):
        assert bench.begin("right", f"10.1.0.{number}", user=f"user-{number}") is None
    assert bench.begin("right") == Refused(QUEUE_FULL)
    assert bench.checker.waiting_count == QUEUE_MAX
    for _ in range(QUEUE_MAX):
        bench.thread.step()
    assert len(bench.outcomes) == QUEUE_MAX
    assert bench.checker.waiting_count == 0
    assert isinstance(bench.run("right"), Accepted)


def test_many_clients_of_one_user_cost_one_check(bench: Bench) -> None:
    for _ in range(100):
        assert bench.begin("right") is None
    bench.thread.step()
    assert [type(outcome) for outcome in bench.outcomes] == [Accepted] * 100
    assert bench.checker.run_count == 1


def test_an_address_with_many_wrong_passwords_waits_and_others_do_not(bench: Bench) -> None:
    assert isinstance(bench.run("right"), Accepted)
    for _ in range(WRONG_PER_S_MAX):
        assert isinstance(bench.run("wrong"), Rejected)
    assert bench.begin("wrong") == Refused(TOO_MANY_WRONG)
    assert isinstance(bench.begin("right"), Accepted), "remembered"
    assert isinstance(bench.run("wrong", THERE), Rejected)
    bench.clock.now_s += 0.99 / WRONG_PER_S_MAX
    assert isinstance(bench.run("wrong"), Rejected)
    assert bench.begin("wrong") == Refused(TOO_MANY_WRONG)
    bench.clock.now_s += 1
    assert isinstance(bench.run("wrong"), Rejected)


def test_wrong_passwords_that_wait_already_are_limited_too(bench: Bench) -> None:
    for _ in range(100):
        assert bench.begin("wrong") is None
    for _ in range(WRONG_PER_S_MAX):
        bench.thread.step()
    assert not bench.thread.jobs
    kinds = [type(outcome) for outcome in bench.outcomes]
    assert kinds == [Rejected] * WRONG_PER_S_MAX + [Refused] * (100 - WRONG_PER_S_MAX)


def test_a_check_that_fails_unexpectedly_is_a_wrong_one_and_the_next_runs(bench: Bench) -> None:
    assert bench.begin("right") is None
    assert bench.begin("right", THERE) is None
    _, done = bench.thread.jobs.pop()
    done(None, MemoryError())
    assert bench.outcomes == [Rejected("the check failed: MemoryError")]
    bench.thread.step()
    assert isinstance(bench.outcomes[1], Accepted)


def test_a_client_that_has_gone_costs_no_check(bench: Bench) -> None:
    for _ in range(10):
        assert bench.begin("wrong") is None
    bench.is_wanted = False
    bench.thread.step()
    assert not bench.thread.jobs
    assert bench.checker.run_count == 1
    bench.is_wanted = True
    assert isinstance(bench.run("right"), Accepted)


def test_a_stopping_broker_drops_what_waits(bench: Bench) -> None:
    for _ in range(10):
        assert bench.begin("wrong") is None
    bench.checker.stop()
    bench.thread.step()
    assert not bench.thread.jobs


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("no:address", "no:address"),
    ],
)
def test_a_network_of_ipv6_counts_as_one_address(address: str, network: str) -> None:
    assert network_of(address) == network
