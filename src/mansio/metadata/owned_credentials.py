"""Conditions under which the credentials that belong to a user are created and deleted: API keys, access keys of SQS,
delegation tokens.

Whoever creates one also writes the value with the API keys of its owner, on condition that it has not changed since the
owner's credentials were counted. So of two concurrent creations one fails, and counts again, and no owner gets more
than its limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.metadata import metadata_store
from mansio.metadata.api_keys import api_keys_document
from mansio.metadata.metadata_store import Compare, Put
from mansio.state.authentication.credentials import ScramMechanism

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import Keys
    from mansio.state.authentication.credentials import ScramCredential


def user_guard(keys: Keys, name: str, known: Mapping[str, ScramCredential]) -> list[Compare]:
    """Return the conditions that a user has the credentials in `known`, by mechanism, and no others; none of them: that
    there is no such user."""
    return [
        Compare(
            keys.credential(name, each.value),
            mod_revision=known[each.value].revision if each.value in known else 0,
        )
        for each in ScramMechanism
    ]


def owned_guard(state: MetadataImage, owner: str) -> Compare:
    """Return the condition that nothing was created for an owner since `state` was counted."""
    return Compare(state.keys.user_api_keys(owner), mod_revision=state.api_keys_of(owner).revision)


def creation_guard(state: MetadataImage, owner: str) -> list[Compare]:
    """Return the conditions that nothing was created for an owner meanwhile, and that its user, or the absence of one,
    is as `state` has it."""
    return [*user_guard(state.keys, owner, state.users.get(owner, {})), owned_guard(state, owner)]


def creation_mark(state: MetadataImage, owner: str, writer: str) -> Put:
    """Return what is written with each new credential of an owner, so that the `creation_guard` of others fails."""
    document = api_keys_document(state.api_keys_of(owner).keys.values())
    return Put(state.keys.user_api_keys(owner), metadata_store.encode(document, writer))
