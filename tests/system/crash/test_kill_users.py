"""Users outlive the broker: what was acknowledged is there after a kill."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.errors import MansioError
from support.process import served
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.full
def test_acknowledged_users_survive_a_kill_in_the_middle_of_changes(tmp_path: Path) -> None:
    created: list[str] = []
    is_over = threading.Event()
    with served(tmp_path / "data", http=False) as broker:

        def create() -> None:
            with (
                contextlib.suppress(MansioError),
                mansio.blocking.connect(broker.bootstrap_servers) as client,
            ):
                while not is_over.is_set():
                    name = f"user-{len(created)}"
                    client.admin.users.create(name, "secret", mechanisms=["SCRAM-SHA-256"])
                    created.append(name)

        thread = threading.Thread(target=create, daemon=True)
        thread.start()
        wait_until(lambda: len(created) >= 20)
        broker.kill()
        is_over.set()
        acknowledged = set(created)
        broker.start()
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            found = {user.name for user in client.admin.users.list()}
            assert acknowledged <= found
        wait_until(lambda: not thread.is_alive(), 60)
