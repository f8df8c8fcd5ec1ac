"""The brokers a suite runs against: processes on loopback ports, their data and logs below the suite's `brokers`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka.admin import AdminClient, ScramCredentialInfo, UserScramCredentialUpsertion

from support.machine import scaled
from support.process import ServedBroker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from confluent_kafka.admin import ScramMechanism

FOLDER = "brokers"
ITERATIONS: Final = 4_096
USERS_DEADLINE_S: Final = 30


AUTHORIZER: Final[dict[str, Any]] = {"authorizer": "acl", "allow_everyone_if_no_acl_found": "true"}
"""What no ACL names is allowed, as by the test brokers of the authors of librdkafka and kafka-go."""


def sasl_settings(kafka_port: int, sasl_port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """Settings of a broker that has, beside its open listener, one without TLS on which clients log in."""
    listeners = f"PLAINTEXT://{host}:{kafka_port},SASL_PLAINTEXT://{host}:{sasl_port}"
    return {"listeners": listeners, "advertised_listeners": listeners, "open_listeners": "PLAINTEXT"}


def create_users(bootstrap_servers: str, users: Iterable[tuple[str, ScramMechanism, bytes]]) -> None:
    """Create credentials: name, mechanism, password."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    for name, mechanism, password in users:
        credential = UserScramCredentialUpsertion(name, ScramCredentialInfo(mechanism, ITERATIONS), password)
        (changed,) = admin.alter_user_scram_credentials([credential]).values()
        changed.result(scaled(USERS_DEADLINE_S))


@contextmanager
def one_broker(
    directory: Path, *, host: str = "127.0.0.1", data: str = "data", sasl_port: int = 0, **settings: object
) -> Iterator[ServedBroker]:
    """A running broker that advertises `host`, with its files in the directory `data`; killed at the end.

    `sasl_port`: of a listener without TLS on which clients log in, beside the open one; 0: there is none.
    """
    broker = ServedBroker(directory / FOLDER / data, http=False)
    config = {"advertised_listeners": f"{host}:{broker.kafka_port}", **AUTHORIZER, **settings}
    if sasl_port:
        config |= sasl_settings(broker.kafka_port, sasl_port, host)
    listeners = config.pop("listeners", broker.bootstrap_servers)
    broker.arguments = [part for name, value in config.items() for part in ("--set", f"{name}={value}")]
    broker.arguments += ["--kafka", str(listeners)]  # the last one counts
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
