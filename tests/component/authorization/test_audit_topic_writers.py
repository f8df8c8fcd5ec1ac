"""Only a registered broker that sends a request for itself writes to the topic of the audit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from mansio.api.kafka.handlers.produce import _is_broker

if TYPE_CHECKING:
    from collections.abc import Collection


@pytest.mark.parametrize(
    ("peer", "is_forwarded", "registered", "expected"),
    [
        ("one", False, ["one"], True),
        (None, False, ["one"], False),
        ("one", True, ["one"], False),
        ("one", False, [], False),
    ],
)
def test_a_request_of_a_client_or_of_an_ended_session_is_not_one_of_a_broker(
    peer: str | None, is_forwarded: bool, registered: Collection[str], expected: bool
) -> None:
    authenticator = SimpleNamespace(is_current_session=lambda identity: identity in registered)
    service = cast("Any", SimpleNamespace(authenticator=authenticator))
    connection = cast("Any", SimpleNamespace(peer=peer, is_forwarded=is_forwarded))
    assert _is_broker(service, connection) is expected
