"""One broker process for all foreign clients of a test worker, and topics that no other test uses."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from support.machine import scaled

with warnings.catch_warnings():
    # kafka-python reads its schemas through what importlib.resources deprecated, when imported and later on.
    warnings.filterwarnings("ignore", "(read|open)_text is deprecated", DeprecationWarning)
    from system.interop.clients import QUIET

from support.process import ServedBroker, served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SETTINGS = {"group_initial_rebalance_delay_ms": 100, "group_min_session_timeout_ms": 1000}
ARGUMENTS = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]

_numbers = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:(read|open)_text is deprecated:DeprecationWarning")


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    with served(tmp_path_factory.mktemp("interop") / "data", arguments=ARGUMENTS, http=False) as running:
        yield running
        assert "Traceback" not in running.text()
        assert running.stop() == 0


@pytest.fixture(scope="session")
def bootstrap_servers(broker: ServedBroker) -> str:
    return broker.bootstrap_servers


@pytest.fixture
def unique() -> str:
    """A name no other test of this process uses, for topics and groups."""
    return f"interop-{next(_numbers)}"


@pytest.fixture
def make_topic(bootstrap_servers: str, unique: str) -> Callable[..., str]:
    """Create a topic and return its name: `make_topic(3, max_message_bytes="1000")`."""
    return lambda partitions=1, **config: create_topic(
        bootstrap_servers, f"{unique}-{next(_numbers)}", partitions, **config
    )


def create_topic(bootstrap_servers: str, name: str, partitions: int = 1, **config: str) -> str:
    settings = {key.replace("_", "."): value for key, value in config.items()}
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, **QUIET})
    admin.create_topics([NewTopic(name, partitions, 1, config=settings)])[name].result(scaled(15))
    return name
