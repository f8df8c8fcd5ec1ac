"""API keys in the metadata store: the value of the key `apikeys/USER` has all keys of a user, by id.

They are one value, so that one transaction deletes a user with its keys, and none can be added meanwhile. It exists
also without keys, while the user has other credentials (`owned_credentials`).

Invariant: no error contains a part of a key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from mansio.errors import StorageError
from mansio.state.authentication.api_keys import HASH_BYTES, StoredApiKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mansio.metadata.metadata_store import Keys


class StoredApiKeys(NamedTuple):
    """The API keys of one user by id. `revision`: of the value in the metadata store, 0 if there is none."""

    keys: Mapping[str, StoredApiKey]
    revision: int = 0


NO_API_KEYS = StoredApiKeys({})


def user_of_api_keys(keys: Keys, key: str) -> str:
    """Return the name of the user whose API keys have this key in the metadata store."""
    return unquote(key.removeprefix(keys.api_keys))


def api_keys_document(api_keys: Iterable[StoredApiKey]) -> dict[str, Any]:
    """Return the value with the API keys of a user."""
    return {
        "keys": {
            each.key_id: {
                "sha256": each.key_sha256.hex(),
                "created_ms": each.created_ms,
                "expires_ms": each.expires_ms,
                "description": each.description,
            }
            for each in api_keys
        }
    }


def decode_api_keys(key: str, user: str, document: Mapping[str, Any], revision: int) -> StoredApiKeys:
    """Decode the value with the API keys of a user. Raises `StorageError`."""
    try:
        found = {key_id: _decode(key_id, user, value) for key_id, value in document["keys"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    else:
        if all(len(each.key_sha256) == HASH_BYTES for each in found.values()):
            return StoredApiKeys(found, revision)
    raise StorageError(f"metadata {key} is damaged")


def _decode(key_id: str, user: str, value: Mapping[str, Any]) -> StoredApiKey:
    expires_ms = value["expires_ms"]
    return StoredApiKey(
        key_id,
        user,
        bytes.fromhex(value["sha256"]),
        int(value["created_ms"]),
        None if expires_ms is None else int(expires_ms),
        str(value["description"]),
    )
