"""Four boto3 clients at full speed for a minute get no refusal, although many of their requests are signed alike."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mansio.testing.broker import TestBroker
from support.secured_broker import set_password
from support.sqs import poll_at_full_speed

if TYPE_CHECKING:
    from pathlib import Path

POLL_S = float(os.environ.get("MANSIO_NIGHTLY_POLL_S", "60"))


def test_four_pollers_for_a_minute_get_no_refusal(tmp_path: Path) -> None:
    key_file = tmp_path / "secrets.key"
    key_file.write_text("5a" * 32)
    key_file.chmod(0o600)
    with TestBroker(secrets_key_file=str(key_file)) as broker:
        set_password(broker, "alice", "password")
        key = broker.client().admin.users.create_sqs_key("alice")
        assert key.secret is not None
        assert poll_at_full_speed(broker.sqs_url, (key.key_id, key.secret), POLL_S) > POLL_S
