"""Bearer tokens (RFC 6750): JSON Web Tokens that an identity provider signs (RFC 7519, RFC 8725, RFC 9068), verified
with its public keys (JWKS, RFC 7517).

A token is accepted if its signature is that of a key of the provider, and its claims say that it is meant for this
broker: `iss` and `aud` as configured, `exp` in the future, `iat` and `nbf` not in the future, and a subject that is the
name of a user. The rules are those of Kafka's BrokerJwtValidator (KIP-768), which leaves `iss` and `aud` optional.

Invariants:
* Only asymmetric algorithms are verified, and each key only with those of its type, its curve and its `alg`: what a
  token states chooses among them, so that a public key is never the secret of an HMAC.
* Keys come from the provider's document only. Headers that bring or name a key (`jwk`, `jku`, `x5c`, `x5u`) have no
  effect; a token with `crit` or `b64` is refused.
* No reason of a rejection and no `repr` contains a token.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import MansioError
from mansio.state.authentication.outcomes import Accepted, Rejected
from mansio.state.authentication.user_names import find_name_fault

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TOKEN_CHARACTERS_MAX: Final = 16_384
KEY_ID_CHARACTERS_MAX: Final = 512
DOCUMENT_BYTES_MAX: Final = 256 << 10
"""Maximum size of the provider's document with its keys."""
KEYS_MAX: Final = 100
RSA_BITS_MIN: Final = 2048
RSA_BITS_MAX: Final = 8192
GROUPS_MAX: Final = 64
"""Maximum number of groups of a user. A token with more is refused: without one of them, a DENY might be missed."""
GROUP_BYTES_MAX: Final = 255

RSA_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
CURVE_ALGORITHMS: Final = {
    "P-256": "ES256",
    "P-384": "ES384",
    "P-521": "ES512",
    "Ed25519": "EdDSA",
    "Ed448": "EdDSA",
}
"""Algorithm by the curve of a key."""
ALGORITHMS: Final = (*RSA_ALGORITHMS, *dict.fromkeys(CURVE_ALGORITHMS.values()))
TYPES: Final = ("", "jwt", "at+jwt", "application/at+jwt")
"""Values of the header `typ`, in lower case; "": without it. Others are tokens of other protocols, as logout tokens."""

_COMPACT: Final = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)")


class InvalidKeys(MansioError):
    """The provider's document has no key that can be used."""

    default_message = "the document has no usable key"


class VerificationKey(NamedTuple):
    """A public key of the provider. `key_id`: "" for one without; `algorithms`: those with which it verifies."""

    key_id: str
    algorithms: frozenset[str]
    key: Any


class KeySet:
    """The public keys of the provider."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Iterable[VerificationKey]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key_id: str | None, algorithm: str) -> VerificationKey | None:
        """Return the key with this id for this algorithm; without an id, the only key for the algorithm."""
        found = [
            key
            for key in self._keys
            if algorithm in key.algorithms and (key_id is None or key.key_id == key_id)
        ]
        return found[0] if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a token has to say. `subject_claim` has the name of the user, `groups_claim` those of the user's groups; "":
    users of tokens have no groups. `clock_skew_ms`: by which the provider's clock may differ."""

    issuer: str
    audiences: frozenset[str]
    subject_claim: str = "sub"
    groups_claim: str = ""
    clock_skew_ms: int = 0


class UnknownKey(NamedTuple):
    """No key of the provider verifies the token: it may have new ones. `reason` is for the log."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Parts:
    header: Mapping[str, Any] = field(repr=False)
    claims: Mapping[str, Any] = field(repr=False)


def parse_keys(document: bytes) -> KeySet:
    """Return the keys of a JWKS that verify signatures; others are left out (RFC 7517). Raises `InvalidKeys`."""
    if len(document) > DOCUMENT_BYTES_MAX:
        raise InvalidKeys(f"the document has more than {DOCUMENT_BYTES_MAX} bytes")
    parsed = _json_object(document)
    listed = None if parsed is None else parsed.get("keys")
    if not isinstance(listed, list):
        raise InvalidKeys("the document is no JWKS: a JSON object with an array `keys`")
    if len(listed) > KEYS_MAX:
        raise InvalidKeys(f"the document has more than {KEYS_MAX} keys")
    keys = [key for each in listed if isinstance(each, dict) and (key := _parse_key(each)) is not None]
    if not keys:
        raise InvalidKeys("the document has no public key for RS, PS, ES or EdDSA signatures")
    return KeySet(keys)


def _parse_key(described: Mapping[str, Any]) -> VerificationKey | None:
    from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

    kind, curve = described.get("kty"), described.get("crv")
    operations = described.get("key_ops", ["verify"])
    if described.get("use", "sig") != "sig" or not isinstance(operations, list) or "verify" not in operations:
        return None
    if "d" in described:  # a private key is known to whoever reads the document
        return None
    possible: tuple[str, ...] = ()
    parser: Any = None
    if kind == "RSA":
        possible, parser = RSA_ALGORITHMS, RSAAlgorithm
    elif kind in ("EC", "OKP") and isinstance(curve, str) and curve in CURVE_ALGORITHMS:
        possible, parser = (CURVE_ALGORITHMS[curve],), ECAlgorithm if kind == "EC" else OKPAlgorithm
    stated = described.get("alg")
    algorithms = frozenset(possible if stated is None else (name for name in possible if name == stated))
    key_id = described.get("kid", "")
    if not algorithms or not isinstance(key_id, str) or len(key_id) > KEY_ID_CHARACTERS_MAX:
        return None
    try:
        key = parser.from_jwk(dict(described))
    except Exception:  # noqa: BLE001 -- whatever the parser makes of a foreign document
        return None
    if kind == "RSA" and not RSA_BITS_MIN <= key.key_size <= RSA_BITS_MAX:
        return None
    return VerificationKey(key_id, algorithms, key)


def verify_token(
    token: str, keys: KeySet, rules: TokenRules, now_ms: int
) -> Accepted | Rejected | UnknownKey:
    """Verify a token. `now_ms`: Unix time. Takes 60 to 150 us of a processor for the signature."""
    parts = _parse(token)
    if isinstance(parts, Rejected):
        return parts
    algorithm, key_id = parts.header.get("alg"), parts.header.get("kid")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        return Rejected("the algorithm of the token is not one of RS, PS, ES and EdDSA")
    kind = parts.header.get("typ", "")
    if not isinstance(kind, str) or kind.lower() not in TYPES:
        return Rejected("the type of the token is not JWT")
    for name in ("crit", "b64"):
        if name in parts.header:
            return Rejected(f"the token has the header {name}")
    if key_id is not None and (not isinstance(key_id, str) or len(key_id) > KEY_ID_CHARACTERS_MAX):
        return Rejected("the key id of the token is not a text")
    key = keys.find(key_id, algorithm)
    if key is None:
        return UnknownKey("no key of the issuer has the key id and the algorithm of the token")
    if not _is_signed(token, key, algorithm):
        return Rejected("the signature of the token is wrong")
    return _check_claims(parts.claims, rules, now_ms)


def _parse(token: str) -> _Parts | Rejected:
    if len(token) > TOKEN_CHARACTERS_MAX:
        return Rejected(f"a token of more than {TOKEN_CHARACTERS_MAX} characters")
    found = _COMPACT.fullmatch(token)
    if found is None:
        return Rejected("the token is not a JWT with one signature")
    header, claims = (_json_object(_decode(found[index])) for index in (1, 2))
    if header is None or claims is None:
        return Rejected("the token does not consist of two JSON objects")
    return _Parts(header, claims)


def _is_signed(token: str, key: VerificationKey, algorithm: str) -> bool:
    import jwt

    try:
        jwt.PyJWS().decode_complete(token, key.key, algorithms=[algorithm])
    except jwt.InvalidTokenError:
        return False
    return True


def _check_claims(claims: Mapping[str, Any], rules: TokenRules, now_ms: int) -> Accepted | Rejected:
    fault = _find_fault(claims, rules, now_ms)
    if fault:
        return Rejected(fault)
    name = claims.get(rules.subject_claim)
    if not isinstance(name, str):
        return Rejected(f"the token has no text {rules.subject_claim}")
    fault = find_name_fault(name)
    if fault:
        return Rejected(f"the {rules.subject_claim} of the token is not the name of a user: {fault}")
    groups = _groups(claims, rules)
    if groups is None:
        return Rejected(
            f"the claim {rules.groups_claim} does not have up to {GROUPS_MAX} names of groups", name
        )
    expires_ms = int(float(claims["exp"]) * 1000) + rules.clock_skew_ms
    return Accepted(name, valid_until_ms=expires_ms, groups=groups, is_by_token=True)


def _find_fault(claims: Mapping[str, Any], rules: TokenRules, now_ms: int) -> str:
    """Return which claim forbids to accept the token now; "" if none does."""
    if claims.get("iss") != rules.issuer:
        return "the token is of another issuer"
    audience = claims.get("aud")
    stated = audience if isinstance(audience, list) else [audience]
    if not any(isinstance(each, str) and each in rules.audiences for each in stated):
        return "the token is for another audience"
    times = {name: claims.get(name) for name in ("exp", "iat", "nbf")}
    if any(value is not None and not _is_time(value) for value in times.values()):
        return "a time of the token is not a number of seconds"
    if times["exp"] is None or times["iat"] is None:
        return "the token has no exp, or no iat"
    if times["exp"] * 1000 + rules.clock_skew_ms <= now_ms:
        return "the token has expired"
    if max(times["iat"], times["nbf"] or 0) * 1000 - rules.clock_skew_ms > now_ms:
        return "the token is not valid yet"
    return ""


def _is_time(value: object) -> bool:
    """Whether a value is a NumericDate of RFC 7519, before the year 9999."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 253_370_764_800


def _groups(claims: Mapping[str, Any], rules: TokenRules) -> tuple[str, ...] | None:
    """Return the groups of the user; None if the claim is malformed, or has too many."""
    if not rules.groups_claim:
        return ()
    stated = claims.get(rules.groups_claim)
    listed = [] if stated is None else [stated] if isinstance(stated, str) else stated
    if not isinstance(listed, list) or len(listed) > GROUPS_MAX:
        return None
    if not all(isinstance(name, str) and _is_group(name) for name in listed):
        return None
    return tuple(dict.fromkeys(listed))


def _is_group(name: str) -> bool:
    return name.isprintable() and 1 <= len(name.encode("utf-8", "replace")) <= GROUP_BYTES_MAX


def _decode(text: str) -> bytes:
    """Return the bytes of base64url without padding; none if it is malformed."""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""


def _json_object(document: bytes) -> dict[str, Any] | None:
    """Return a JSON object; None for anything else, and for one that states a name twice."""
    try:
        found = json.loads(document, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is stated twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
