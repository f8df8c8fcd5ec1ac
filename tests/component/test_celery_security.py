"""Celery over TLS and SASL."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING
from urllib.parse import quote

import celery
import pytest
from celery.contrib.testing.worker import start_worker
from celery.signals import setup_logging

import mansio.celery  # noqa: F401  # registers the transport
from mansio.errors import SaslAuthenticationFailed
from support.certificates import Authority
from support.machine import scaled
from support.secure_front import SecureFront, server_context

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USER, PASSWORD = "alice", "p@ss/word:?"

pytestmark = pytest.mark.full


@pytest.fixture
def logging_of_the_test() -> Iterator[None]:
    """Keep Celery from replacing the handlers and the level of all loggers of the process."""

    def leave_as_it_is(**_: object) -> None:
        pass

    setup_logging.connect(leave_as_it_is)
    yield
    setup_logging.disconnect(leave_as_it_is)


@pytest.mark.usefixtures("logging_of_the_test")
def test_a_task_runs_over_tls_and_a_wrong_password_ends_the_attempt(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with SecureFront(server_context(authority.issue()), {USER: PASSWORD}) as front:
        results: queue.Queue[int] = queue.Queue()
        login = f"{USER}:{quote(PASSWORD, safe='')}"
        url = f"mansio://{login}@{front.address}/?ssl={quote(str(authority.certificate), safe='')}"
        app = celery.Celery("shop", broker=url)

        @app.task
        def add(one: int, other: int) -> None:
            results.put(one + other)

        with start_worker(app, perform_ping_check=False, pool="solo"):
            add.delay(1, 2)
            assert results.get(timeout=scaled(30.0)) == 3
        assert set(front.authentications) == {USER}
        assert PASSWORD not in app.connection().as_uri()

        wrong = app.connection_for_write(url.replace(quote(PASSWORD, safe=""), "wrong"))
        with pytest.raises(SaslAuthenticationFailed):
            wrong.connect()
