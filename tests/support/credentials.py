"""Users with credentials of SCRAM for tests, and a client that is independent of our code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafka.net.sasl.scram import ScramClient

from mansio.state.authentication.credentials import CredentialDirectory, ScramCredential, ScramMechanism

if TYPE_CHECKING:
    from mansio.state.authentication.outcomes import Accepted, Challenge, Rejected
    from mansio.state.authentication.scram import ScramServer

SERVER_SECRET = bytes(range(32))
SALT = bytes(range(100, 132))
NONCE = bytes(24)
CLIENT_NONCE = b"0123456789abcdef" * 2
SHA_256, SHA_512 = ScramMechanism


def credential(
    password: str, mechanism: ScramMechanism = SHA_256, iterations: int = 4_096, salt: bytes = SALT
) -> ScramCredential:
    return ScramCredential.from_password(mechanism, password, salt, iterations)


def directory(**users: ScramCredential | tuple[ScramCredential, ...]) -> CredentialDirectory:
    return directory_of(users)


def directory_of(
    users: dict[str, ScramCredential | tuple[ScramCredential, ...]],
) -> CredentialDirectory:
    """A directory of users by name, each with one or more credentials."""

    def find(user: str, mechanism: ScramMechanism) -> ScramCredential | None:
        found = users.get(user, ())
        for one in found if isinstance(found, tuple) else (found,):
            if one.mechanism is mechanism:
                return one
        return None

    return CredentialDirectory(find, SERVER_SECRET)


class ScramPeer:
    """kafka-python's client, which uses passwords as UTF-8 without SASLprep. It does not escape names: we do."""

    def __init__(
        self,
        user: str,
        password: str,
        mechanism: ScramMechanism = SHA_256,
        header: str = "n,,",
        *,
        extensions: str = "",
    ) -> None:
        """`extensions`: what follows the nonce in the first message."""
        escaped = user.replace("=", "=3D").replace(",", "=2C")
        self._client = ScramClient(escaped, password, mechanism.value)
        self._client.nonce = CLIENT_NONCE  # its own is random
        self._header = header
        self._extensions = extensions.encode()

    def first(self) -> bytes:
        first = self._client.first_message()[3:] + self._extensions
        self._client.auth_message += self._extensions
        return self._header.encode() + first

    def final(self, challenge: bytes) -> bytes:
        self._client.process_server_first_message(challenge)
        return self._client.final_message()

    def verify(self, token: bytes) -> None:
        """Raise `ValueError` if the server does not prove that it knows the credential."""
        self._client.process_server_final_message(token)


def exchange(server: ScramServer, peer: ScramPeer, now_ms: int = 0) -> Challenge | Accepted | Rejected:
    """The outcome of a whole exchange."""
    challenge = server.step(peer.first(), now_ms)
    token = getattr(challenge, "token", None)
    return challenge if token is None else server.step(peer.final(token), now_ms)


def reachable_texts(value: object, depth: int = 4) -> str:
    """`str` and `repr` of a value and, for an exception, of all that it keeps."""
    texts = f"{value!s} {value!r}"
    if isinstance(value, BaseException) and depth:
        for kept in (value.__cause__, value.__context__, *value.args, *vars(value).values()):
            texts += reachable_texts(kept, depth - 1)
        for name in ("object", "doc", "string"):
            texts += repr(getattr(value, name, ""))
    return texts
