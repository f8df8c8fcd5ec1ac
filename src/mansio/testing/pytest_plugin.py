"""Pytest plugin: fixtures with a test broker. It imports no broker before a test uses a fixture.

`mansio_broker` is a new broker for each test, `mansio_broker_session` one for the whole run (with pytest-xdist, of each
worker), `mansio_broker_factory` makes brokers with settings, `mansio_client` is a blocking client of `mansio_broker`,
and `mansio_schemas` registers schemas with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import mansio.blocking
    from mansio.testing.broker import TestBroker


@pytest.fixture
def mansio_broker() -> Iterator[TestBroker]:
    """Yield a running broker for one test; see `mansio.testing.TestBroker`."""
    from mansio.testing.broker import TestBroker

    with TestBroker() as broker:
        yield broker


@pytest.fixture(scope="session")
def mansio_broker_session() -> Iterator[TestBroker]:
    """Yield a running broker for all tests of the run: faster, and tests see the topics and the clock of earlier
    ones."""
    from mansio.testing.broker import TestBroker

    with TestBroker() as broker:
        yield broker


@pytest.fixture
def mansio_broker_factory() -> Iterator[Callable[..., TestBroker]]:
    """Yield a function that starts brokers with the given settings (`mansio_broker_factory(num_partitions=3)`); all are
    closed after the test."""
    from mansio.testing.broker import TestBroker

    started: list[TestBroker] = []

    def start(**settings: Any) -> TestBroker:
        broker = TestBroker(**settings).start()
        started.append(broker)
        return broker

    try:
        yield start
    finally:
        for broker in reversed(started):
            broker.close()


@pytest.fixture
def mansio_client(mansio_broker: TestBroker) -> mansio.blocking.Client:
    """Return a blocking client of `mansio_broker`."""
    return mansio_broker.client()


@pytest.fixture
def mansio_schemas(mansio_client: mansio.blocking.Client) -> Callable[..., int]:
    """Return a function that registers a schema with the registry of `mansio_broker`, and returns its id:
    `mansio_schemas("orders-value", Path("order.avsc"))`. The schema is a text, or a file whose ending names its format
    (.avsc, .json, .proto) unless `kind` does; it needs the extra `registry`."""
    kinds = {".avsc": "AVRO", ".json": "JSON", ".proto": "PROTOBUF"}

    def register(subject: str, schema: str | Path, *, kind: str | None = None) -> int:
        text = schema if isinstance(schema, str) else schema.read_text(encoding="utf-8")
        found = None if isinstance(schema, str) else kinds.get(schema.suffix)
        return mansio_client.admin.schemas.register(subject, text, kind=kind or found or "AVRO").schema_id

    return register
