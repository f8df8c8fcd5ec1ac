"""Users in the metadata store: their credentials for SCRAM (KIP-554), and the server secret.

A credential is the value of the key `users/NAME/MECHANISM`; its revision is that of the key. The server secret is made
once in each cluster, when the first listener authenticates clients.

Invariant: no error contains a part of a credential or of the secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from mansio.errors import MansioError, StorageError
from mansio.metadata import metadata_store
from mansio.metadata.metadata_store import Compare, Put, new_writer_id
from mansio.state.authentication.credentials import KeyPair, PreviousKeys, ScramCredential, ScramMechanism

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.metadata.metadata_store import Keys, MetadataStore
    from mansio.ports import Random

KNOWN_MECHANISMS: Final = frozenset(each.value for each in ScramMechanism)
SERVER_SECRET_BYTES: Final = 32


def user_of_key(keys: Keys, key: str) -> tuple[str, str]:
    """Return the names of user and mechanism of a key of a credential."""
    name, _, mechanism = key.removeprefix(keys.users).partition("/")
    return unquote(name), mechanism


def credential_document(credential: ScramCredential) -> dict[str, Any]:
    """Return the value of the key of a credential."""
    document: dict[str, Any] = {
        "iterations": credential.iterations,
        "salt": credential.salt.hex(),
        **_keys_document(credential.keys),
    }
    previous = credential.previous
    if previous is not None:
        document["previous"] = {
            **_keys_document(previous.keys),
            "valid_until_ms": previous.valid_until_ms,
            "revision": previous.revision,
        }
    return document


def _keys_document(keys: KeyPair) -> dict[str, str]:
    return {"stored_key": keys.stored_key.hex(), "server_key": keys.server_key.hex()}


def decode_credential(
    key: str, mechanism: str, document: Mapping[str, Any], revision: int
) -> ScramCredential:
    """Decode the value of the key of a credential. Raises `StorageError`."""
    try:
        previous = document.get("previous")
        return ScramCredential(
            ScramMechanism(mechanism),
            int(document["iterations"]),
            bytes.fromhex(document["salt"]),
            _decode_keys(document),
            None
            if previous is None
            else PreviousKeys(
                _decode_keys(previous), int(previous["valid_until_ms"]), int(previous["revision"])
            ),
            revision,
        )
    except (KeyError, TypeError, ValueError, AttributeError, MansioError):
        pass
    raise StorageError(f"metadata {key} is damaged")


def _decode_keys(document: Mapping[str, Any]) -> KeyPair:
    return KeyPair(bytes.fromhex(document["stored_key"]), bytes.fromhex(document["server_key"]))


async def create_server_secret(store: MetadataStore, keys: Keys, random: Random) -> int:
    """Store a new random server secret, unless the cluster has one. Returns a revision of the store at which it has
    one. Raises `Unavailable`."""
    document = {"secret": random.bytes(SERVER_SECRET_BYTES).hex()}
    put = Put(keys.server_secret, metadata_store.encode(document, new_writer_id(random)))
    guard = [Compare(keys.server_secret, create_revision=0)]
    return (await metadata_store.transact_with_retries(store, guard, [put])).revision


def decode_server_secret(key: str, document: Mapping[str, Any]) -> bytes:
    """Decode the value of the key of the server secret. Raises `StorageError`."""
    try:
        secret = bytes.fromhex(document["secret"])
    except (KeyError, TypeError, ValueError):
        secret = b""
    if len(secret) != SERVER_SECRET_BYTES:
        raise StorageError(f"metadata {key} is damaged")
    return secret
