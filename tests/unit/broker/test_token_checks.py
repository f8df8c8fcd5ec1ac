"""The checks of bearer tokens: accepted ones remembered, wrong ones limited by address."""

from __future__ import annotations

from typing import Any, Final

import pytest

from mansio.broker.services.token_checks import TokenChecker
from mansio.broker.services.wrong_credentials import TOO_MANY_WRONG, WRONG_PER_S_MAX, WrongCredentials
from mansio.state.authentication.bearer_tokens import TokenRules, parse_keys
from mansio.state.authentication.outcomes import NO_KEYS, Accepted, Refused, Rejected
from support.tokens import AUDIENCE, ISSUER, Issuer, claims

ONE: Final = Issuer()
FORGER: Final = Issuer(1)
HERE, THERE = "10.0.0.1", "10.0.0.2"
NOW_S: Final = 1_000_000


class Bench:
    """A checker, and where its keys come from."""

    source, failure = "", ""

    def __init__(self) -> None:
        self.keys: Any = parse_keys(ONE.jwks())
        self.now_s = 1_000.0
        self.refreshes = 0
        clock: Any = self
        self.checker = TokenChecker(TokenRules(ISSUER, frozenset({AUDIENCE})), self, WrongCredentials(clock))

    def monotonic(self) -> float:
        return self.now_s

    def refresh(self) -> None:
        self.refreshes += 1

    def verify(self, token: str, address: str = HERE) -> Accepted | Rejected | Refused:
        return self.checker.verify(token, address, NOW_S * 1000)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def valid(user: str) -> str:
    return ONE.sign(claims(NOW_S, user))


FORGED: Final = (
    FORGER.sign(claims(NOW_S)),
    ONE.sign(claims(1)),
    ONE.sign(claims(NOW_S), headers={"kid": "unknown"}),
    "x",
)


@pytest.mark.parametrize("forged", FORGED, ids=["signature", "expired", "key", "malformed"])
def test_an_address_with_many_wrong_tokens_waits_and_others_do_not(bench: Bench, forged: str) -> None:
    assert isinstance(bench.verify(valid("alice")), Accepted)
    for _ in range(WRONG_PER_S_MAX):
        assert isinstance(bench.verify(forged), Rejected)
    verified = bench.checker.verified_count
    for token in (forged, valid("bob")):
        assert bench.verify(token) == Refused(TOO_MANY_WRONG)
    assert isinstance(bench.verify(valid("alice")), Accepted), "remembered"
    assert bench.checker.verified_count == verified, "without a check"
    assert isinstance(bench.verify(valid("bob"), THERE), Accepted)
    assert isinstance(bench.verify(valid("bob")), Accepted), "from any address"
    bench.now_s += 0.99 / WRONG_PER_S_MAX
    assert isinstance(bench.verify(forged), Rejected)
    assert bench.verify(forged) == Refused(TOO_MANY_WRONG)
    bench.now_s += 1
    assert isinstance(bench.verify(valid("carol")), Accepted)


def test_a_remembered_token_is_forgotten_with_the_keys(bench: Bench) -> None:
    assert isinstance(bench.verify(valid("alice")), Accepted)
    bench.keys = None
    assert bench.verify(valid("alice")) == Refused(NO_KEYS)
    bench.keys = parse_keys(FORGER.jwks())
    assert isinstance(bench.verify(valid("alice")), Rejected)
