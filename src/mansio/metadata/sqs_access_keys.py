"""Access keys of the SQS endpoint in the metadata store, whose secrets are encrypted
(`state.authentication.secrets_keys`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mansio.errors import StorageError
from mansio.state.authentication.secrets_keys import EncryptedSecret

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class SqsAccessKey:
    """An access key. `user`: its owner; `created_ms`: Unix time; `revision`: in which it was written."""

    key_id: str
    user: str
    created_ms: int
    secret: EncryptedSecret = field(repr=False)
    revision: int = 0


def encryption_context(key_id: str, user: str) -> str:
    """Return what the secret of an access key is encrypted for: it cannot be stored as that of another key, or of
    another user."""
    return f"the access key {key_id} of {user}"


def sqs_access_key_document(key: SqsAccessKey) -> dict[str, Any]:
    """Return the value of the key of an access key."""
    return {
        "user": key.user,
        "created_ms": key.created_ms,
        "secrets_key": key.secret.key_id,
        "nonce": key.secret.nonce.hex(),
        "secret": key.secret.ciphertext.hex(),
    }


def decode_sqs_access_key(name: str, key_id: str, document: Mapping[str, Any], revision: int) -> SqsAccessKey:
    """Decode the value of the key `name`. Raises `StorageError`."""
    try:
        return SqsAccessKey(
            key_id,
            str(document["user"]),
            int(document["created_ms"]),
            EncryptedSecret(
                str(document["secrets_key"]),
                bytes.fromhex(document["nonce"]),
                bytes.fromhex(document["secret"]),
            ),
            revision,
        )
    except (KeyError, TypeError, ValueError):
        pass
    raise StorageError(f"metadata {name} is damaged")
