"""Bearer tokens: those of the issuer for this broker are accepted while they are valid, and no others."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from joserfc import jwt as other_jwt
from joserfc.jwk import RSAKey
from jwt.algorithms import RSAAlgorithm

from mansio.broker.routing.caller import ANONYMOUS_USER
from mansio.state.authentication.bearer_tokens import (
    GROUPS_MAX,
    KEYS_MAX,
    TOKEN_CHARACTERS_MAX,
    InvalidKeys,
    TokenRules,
    UnknownKey,
    parse_keys,
    verify_token,
)
from mansio.state.authentication.outcomes import Accepted, Rejected
from support.tokens import AUDIENCE, ISSUER, KEY_ID, Issuer, claims, encode, unsigned, with_hmac

NOW_S: Final = 1_700_000_000
SKEW_S: Final = 30
ONE: Final = Issuer()
KEYS: Final = parse_keys(ONE.jwks())
RULES: Final = TokenRules(
    ISSUER, frozenset({AUDIENCE, "other"}), groups_claim="groups", clock_skew_ms=SKEW_S * 1000
)
HEADER: Final = {"alg": "RS256", "kid": KEY_ID}
TWICE: Final = b'{"alg":"RS256","alg":"none"}'
NOT_UTF_8: Final = b"\xff\xfe"


def check(token: str, now_s: float = NOW_S) -> Accepted | Rejected | UnknownKey:
    return verify_token(token, KEYS, RULES, int(now_s * 1000))


def signed(**more: Any) -> str:
    return ONE.sign(claims(NOW_S, **more))


@pytest.mark.parametrize(
    ("key_id", "algorithm"),
    [(KEY_ID, "RS256"), (KEY_ID, "RS512"), (KEY_ID, "PS256"), ("ec-1", "ES256"), ("ed-1", "EdDSA")],
)
def test_valid_token_of_each_kind_logs_its_subject_in(key_id: str, algorithm: str) -> None:
    token = ONE.sign(claims(NOW_S, groups=["a", "b", "a"]), key_id=key_id, algorithm=algorithm)
    accepted = Accepted(
        "alice", valid_until_ms=(NOW_S + 300 + SKEW_S) * 1000, groups=("a", "b"), is_by_token=True
    )
    assert check(token) == accepted
    head, body, signature = token.split(".")
    altered = encode(claims(NOW_S, user="admin"))
    assert isinstance(check(f"{head}.{altered}.{signature}"), Rejected)
    assert isinstance(check(f"{head}.{body}.{signature[:-4]}AAAA"), Rejected)


def test_another_implementation_makes_tokens_that_are_accepted() -> None:
    key = RSAKey.import_key(ONE.keys[KEY_ID])
    token = other_jwt.encode({**HEADER, "typ": "at+jwt"}, claims(NOW_S, aud=["x", AUDIENCE]), key)
    assert check(token) == Accepted("alice", valid_until_ms=(NOW_S + 300 + SKEW_S) * 1000, is_by_token=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"iss": "https://other.example"}, "issuer"),
        ({"iss": None}, "issuer"),
        ({"aud": "another service"}, "audience"),
        ({"aud": None}, "audience"),
        ({"aud": [AUDIENCE.upper(), 3]}, "audience"),
        ({"aud": {AUDIENCE: 1}}, "audience"),
        ({"exp": NOW_S - SKEW_S}, "expired"),
        ({"exp": None}, "no exp"),
        ({"exp": True}, "not a number"),
        ({"exp": "9999999999"}, "not a number"),
        ({"exp": 1e300}, "not a number"),
        ({"iat": None}, "no iat"),
        ({"iat": NOW_S + SKEW_S + 1}, "not valid yet"),
        ({"nbf": NOW_S + SKEW_S + 1}, "not valid yet"),
        ({"sub": None}, "no text sub"),
        ({"sub": ["alice"]}, "no text sub"),
        ({"sub": ""}, "not the name"),
        ({"sub": ANONYMOUS_USER}, "reserved"),
        ({"sub": "*"}, "reserved"),
        ({"sub": "al\u200bice"}, "not the name"),
        ({"sub": "a" * 256}, "not the name"),
        ({"groups": [f"g{number}" for number in range(GROUPS_MAX + 1)]}, "groups"),
        ({"groups": ["a\nb"]}, "groups"),
        ({"groups": {"a": 1}}, "groups"),
    ],
)
def test_claims_that_are_not_for_this_broker_now_are_refused(change: dict[str, Any], reason: str) -> None:
    found = check(ONE.sign(claims(NOW_S, **change)))
    assert isinstance(found, Rejected), found
    assert reason in found.reason


def test_the_clock_of_the_issuer_may_differ_by_the_skew() -> None:
    token = signed(exp=NOW_S, nbf=NOW_S)
    assert isinstance(check(token, NOW_S + SKEW_S - 1), Accepted)
    assert isinstance(check(token, NOW_S + SKEW_S), Rejected)
    assert isinstance(check(token, NOW_S - SKEW_S), Accepted)
    assert isinstance(check(token, NOW_S - SKEW_S - 1), Rejected)


def test_no_signature_and_a_signature_with_the_public_key_as_secret_are_refused() -> None:
    body = claims(NOW_S, user="admin")
    for name in ("none", "None", "NONE", "nOnE"):
        assert isinstance(check(unsigned({"alg": name}, body)), Rejected)
        assert isinstance(check(unsigned({"alg": name}, body) + "AAAA"), Rejected)
    secrets = [ONE.public_pem(), ONE.public_pem().strip(), ONE.jwks(), json.dumps(ONE.jwk()).encode()]
    for secret in secrets:
        for name in ("HS256", "RS256", "hs256"):
            assert isinstance(check(with_hmac({**HEADER, "alg": name}, body, secret)), Rejected)


def test_keys_and_addresses_of_keys_that_a_token_brings_have_no_effect() -> None:
    attacker = Issuer(1)
    body = claims(NOW_S, user="admin")
    brought = {
        "jwk": attacker.jwk(),
        "jku": "http://127.0.0.1:1/keys",
        "x5u": "http://127.0.0.1:1/certificate",
        "x5c": ["AAAA"],
    }
    for name, value in brought.items():
        assert isinstance(check(attacker.sign(body, headers={name: value})), Rejected)
        assert isinstance(
            check(ONE.sign(body, headers={name: value})), Accepted
        )  # of the issuer all the same
        assert isinstance(check(attacker.sign(body, headers={name: value, "kid": "mine"})), UnknownKey)


@pytest.mark.parametrize(
    "headers",
    [
        {"crit": ["exp"], "exp": 1},
        {"crit": []},
        {"crit": ["b64"], "b64": False},
        {"b64": True},
        {"typ": "logout+jwt"},
        {"typ": "JWE"},
        {"kid": ["rsa-1"]},
        {"kid": "k" * 1_000},
    ],
    ids=str,
)
def test_headers_that_change_what_a_token_means_are_refused(headers: dict[str, Any]) -> None:
    token = with_hmac({**HEADER, **headers}, claims(NOW_S), b"")
    found = check(token)
    assert isinstance(found, Rejected), found
    assert "signature" not in found.reason


@pytest.mark.parametrize(
    "key_id",
    ["../../etc/passwd", "/dev/null", "file:///etc/passwd", "rsa-1\0", "' OR 1=1 --", "", "RSA-1", "ec-1"],
)
def test_key_id_is_compared_and_nothing_else(key_id: str) -> None:
    found = check(ONE.sign(claims(NOW_S), headers={"kid": key_id}))
    assert isinstance(found, UnknownKey | Rejected)


def test_a_key_verifies_its_own_algorithms_only() -> None:
    restricted = {**ONE.jwk(), "alg": "PS256"}
    keys = parse_keys(json.dumps({"keys": [restricted, ONE.jwk("ec-1")]}).encode())
    for algorithm, kind in (("RS256", UnknownKey), ("PS256", Accepted)):
        token = ONE.sign(claims(NOW_S), algorithm=algorithm)
        assert isinstance(verify_token(token, keys, RULES, NOW_S * 1000), kind)


def test_without_a_key_id_the_only_key_of_the_algorithm_counts() -> None:
    token = ONE.sign(claims(NOW_S), headers={"kid": None})
    assert isinstance(check(token), Accepted)
    two = parse_keys(json.dumps({"keys": [ONE.jwk(), {**Issuer(1).jwk(), "kid": "rsa-2"}]}).encode())
    assert isinstance(verify_token(token, two, RULES, NOW_S * 1000), UnknownKey)


@pytest.mark.parametrize(
    "token",
    [
        "",
        ".",
        "..",
        "a.b",
        signed() + ".more",
        signed() + "=",
        " " + signed(),
        signed() + "\n",
        signed().replace(".", "..", 1),
        "a" * (1 << 20),
        f"{encode(HEADER)}.{encode(b'[' * 8_000)}.AAAA",
        f"{encode(HEADER)}.{encode(b'NaN')}.AAAA",
        f"{encode(TWICE)}.{encode(claims(NOW_S))}.AAAA",
        f"{encode(HEADER)}.{encode(NOT_UTF_8)}.AAAA",
        json.dumps({"payload": "e30", "signatures": [{"signature": "a"}, {"signature": "b"}]}),
    ],
    ids=lambda token: token[:12] or "empty",
)
def test_malformed_token_is_refused(token: str) -> None:
    found = check(token)
    assert isinstance(found, Rejected)
    assert len(token) < 20 or token[:20] not in found.reason


def test_token_at_the_limit_of_size_is_accepted_and_a_larger_one_refused() -> None:
    token = signed(filler="f" * 11_000)
    assert len(token) <= TOKEN_CHARACTERS_MAX
    assert isinstance(check(token), Accepted)
    assert isinstance(check(signed(filler="f" * TOKEN_CHARACTERS_MAX)), Rejected)


def test_keys_that_do_not_verify_signatures_are_left_out() -> None:
    usable = ONE.jwk()
    unusable: list[Any] = [
        {"kty": "oct", "k": "AAAA", "kid": "secret"},
        {**usable, "use": "enc", "kid": "encryption"},
        {**usable, "key_ops": ["encrypt"], "kid": "operations"},
        {**json.loads(RSAAlgorithm.to_jwk(ONE.keys[KEY_ID])), "key_ops": ["verify"], "kid": "private"},
        {**usable, "n": "AAAA", "kid": "short"},
        {**usable, "alg": "HS256", "kid": "hmac"},
        {"kty": "EC", "crv": "P-192", "x": "AA", "y": "AA"},
        {"kty": "RSA"},
        {"kty": ["RSA"], "crv": {}},
        3,
    ]
    assert len(parse_keys(json.dumps({"keys": [*unusable, usable]}).encode())) == 1
    for document in (
        json.dumps({"keys": unusable}).encode(),
        json.dumps({"keys": [usable] * (KEYS_MAX + 1)}).encode(),
        json.dumps(usable).encode(),
        b"",
        b"<html>",
        b"[" * 100_000,
        b'{"keys": {}}',
        ONE.jwks() + b" " * (256 << 10),
    ):
        with pytest.raises(InvalidKeys):
            parse_keys(document)
