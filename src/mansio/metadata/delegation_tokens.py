"""Delegation tokens in the metadata store: the value of the key `tokens/ID`. It does not contain the secret.

Invariant: no error contains a part of a credential.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.errors import StorageError
from mansio.metadata.users import KNOWN_MECHANISMS, credential_document, decode_credential
from mansio.state.authentication.delegation_tokens import DelegationToken

if TYPE_CHECKING:
    from collections.abc import Mapping


def token_document(token: DelegationToken) -> dict[str, Any]:
    """Return the value of the key of a token."""
    return {
        "owner": token.owner,
        "requester": token.requester,
        "renewers": list(token.renewers),
        "issued_ms": token.issued_ms,
        "expires_ms": token.expires_ms,
        "max_ms": token.max_ms,
        "digest": token.digest,
        "secrets_key": token.secrets_key_id,
        "of_stored_user": token.is_of_stored_user,
        "credentials": {name: credential_document(each) for name, each in token.credentials.items()},
    }


def decode_token(name: str, token_id: str, document: Mapping[str, Any], revision: int) -> DelegationToken:
    """Decode the value of the key `name`. Raises `StorageError`."""
    try:
        return DelegationToken(
            token_id,
            str(document["owner"]),
            str(document["requester"]),
            tuple(map(str, document["renewers"])),
            int(document["issued_ms"]),
            int(document["expires_ms"]),
            int(document["max_ms"]),
            str(document["digest"]),
            str(document["secrets_key"]),
            {
                mechanism: decode_credential(name, mechanism, each, revision)
                for mechanism, each in document["credentials"].items()
                if mechanism in KNOWN_MECHANISMS
            },
            revision,
            bool(document.get("of_stored_user", False)),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    raise StorageError(f"metadata {name} is damaged")
