"""Producer of librdkafka that logs in over TLS and produces on a thread until it is stopped, for tests in which
certificates, passwords or leaders change meanwhile."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from confluent_kafka import Producer

from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

RECORDS_PER_STEP = 50
PAUSE_S = 0.005
DEADLINE_S = 60


class SecureProducer:
    """Produces records with values that begin with `name`. Use as `with`, whose end raises if a produce has failed.
    `acknowledged`: the values that are stored."""

    def __init__(
        self, bootstrap_servers: str, ca: Path, topic: str, *, name: str, user: str, password: str
    ) -> None:
        self._name = name
        self._topic = topic
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "SCRAM-SHA-256",
                "sasl.username": user,
                "sasl.password": password,
                "ssl.ca.location": str(ca),
                "enable.idempotence": True,
                "log_level": 0,
            }
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.acknowledged: set[bytes] = set()
        self.failures: list[str] = []

    def _run(self) -> None:
        for number in itertools.count():
            if self._stopped.is_set():
                return
            value = f"{self._name}-{number}".encode()
            self._producer.produce(self._topic, value, on_delivery=self._on_delivery)
            self._producer.poll(0)
            time.sleep(PAUSE_S)

    def _on_delivery(self, error: object, message: Any) -> None:
        if error is None:
            self.acknowledged.add(message.value())
        else:
            self.failures.append(str(error))

    def wait_for_more(self) -> None:
        """Return after further acknowledgements."""
        wanted = len(self.acknowledged) + RECORDS_PER_STEP
        wait_until(
            lambda: self.failures or len(self.acknowledged) >= wanted, DEADLINE_S, "further acknowledgements"
        )
        assert not self.failures

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        assert self._producer.flush(scaled(DEADLINE_S)) == 0
        assert not self.failures
