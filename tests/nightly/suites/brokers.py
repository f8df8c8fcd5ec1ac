"""The brokers a suite runs against: processes on loopback ports, their data and logs below the suite's `brokers`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from support.process import ServedBroker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDER = "brokers"


@contextmanager
def one_broker(
    directory: Path, *, host: str = "127.0.0.1", data: str = "data", sasl_port: int = 0, **settings: object
) -> Iterator[ServedBroker]:
    """A running broker that advertises `host`, with its files in the directory `data`; killed at the end.

    `sasl_port`: of a listener without TLS on which clients log in, beside the open one; 0: there is none.
    """
    broker = ServedBroker(directory / FOLDER / data, http=False)
    config = {"advertised_listeners": f"{host}:{broker.kafka_port}", **settings}
    if sasl_port:
        listeners = f"PLAINTEXT://{host}:{broker.kafka_port},SASL_PLAINTEXT://{host}:{sasl_port}"
        config |= {"advertised_listeners": listeners, "open_listeners": "PLAINTEXT"}
    broker.arguments = [part for name, value in config.items() for part in ("--set", f"{name}={value}")]
    if sasl_port:
        broker.arguments += ["--kafka", listeners]
    try:
        yield broker.start()
    finally:
        broker.kill()


def logs_with_exceptions(directory: Path) -> list[Path]:
    """The brokers' logs in which there is a stack trace."""
    return [
        log
        for log in sorted((directory / FOLDER).glob("*.log"))
        if "Traceback" in log.read_text(errors="replace")
    ]
