"""Test brokers whose HTTP, gRPC and SQS listeners have TLS or users; their users, and the renewal of certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.broker.services.users import CredentialDeletion, CredentialUpsertion
from mansio.state.authentication.credentials import ITERATIONS_MIN, ScramMechanism, salt_password
from mansio.testing.broker import TestBroker
from support.authorization import PEER
from support.machine import scaled
from support.present import present
from support.waiting import wait_until

if TYPE_CHECKING:
    from support.certificates import Authority, Certificate

SALT: Final = bytes(range(32))
MECHANISM: Final = ScramMechanism.SHA_256
DEADLINE_S: Final = 30


def secured_broker(authority: Authority, issued: Certificate, **settings: Any) -> TestBroker:
    """Return a test broker, to be started, with these certificates."""
    files = {
        "ssl_certificate_location": str(issued.certificate),
        "ssl_key_location": str(issued.key),
        "ssl_ca_location": str(authority.certificate),
    }
    return TestBroker(**{**files, **settings})


def set_password(broker: TestBroker, user: str, password: str) -> None:
    """Create a user, or change the password of one."""
    salted = salt_password(MECHANISM, password.encode(), SALT, ITERATIONS_MIN)
    upsertion = CredentialUpsertion(user, MECHANISM.kafka_type, ITERATIONS_MIN, SALT, salted)
    users = broker._running().service.users
    changed = broker._call(
        users.alter_each([upsertion], [], is_confidential=True, caller=PEER), scaled(DEADLINE_S)
    )
    assert changed == {user: None}


def delete_user(broker: TestBroker, user: str) -> None:
    deletion = CredentialDeletion(user, MECHANISM.kafka_type)
    users = broker._running().service.users
    changed = broker._call(
        users.alter_each([], [deletion], is_confidential=True, caller=PEER), scaled(DEADLINE_S)
    )
    assert changed == {user: None}


def renew_certificates(broker: TestBroker) -> None:
    """Let the broker read the files of certificates again, and wait until it uses them."""
    running = broker._running()
    certificates = present(present(running._security).certificates)
    before = certificates.reloads

    async def reload() -> None:
        running.reload_certificates()

    broker._call(reload(), scaled(DEADLINE_S))
    wait_until(lambda: certificates.reloads > before, scaled(DEADLINE_S), "the new certificates")
