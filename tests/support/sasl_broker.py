"""A broker on a real disk whose Kafka listener authenticates, on a thread of the test's process; its users; a client
that sends what a test wants.

Always true: the broker is stopped when the `with` block ends; the wait for a user's change has a deadline.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mansio.broker.routing.caller import BROKER_SESSION, Caller
from mansio.broker.services.users import CredentialDeletion, CredentialUpsertion
from mansio.config.security import PLAIN
from mansio.config.settings import DEV_SETTINGS, Settings
from mansio.host.asyncio_loop import new_event_loop
from mansio.node.broker import Broker
from mansio.state.authentication.credentials import ITERATIONS_MIN, ScramMechanism, salt_password
from mansio.wire.api_versions import ApiKey
from support.credentials import ScramPeer
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path

    from mansio.wire.codec.messages import Struct
    from support.raw_peer import RawPeer

T = TypeVar("T")
DEADLINE_S = 30
OPERATOR = Caller(BROKER_SESSION)
"""Who changes users here: with an authorizer, too, it may do everything."""
SALT = bytes(range(32))
HANDSHAKE_VERSION, AUTHENTICATE_VERSION = 1, 2


class SaslBroker:
    """See the module."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.broker = Broker(
            Settings(
                **{
                    **DEV_SETTINGS,
                    "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
                    "http_listener": "",
                    "data_dir": str(directory),
                    "offsets_topic_num_partitions": 1,
                    **settings,
                }
            )
        )

    def start(self) -> None:
        self._thread.start()
        self.run(self.broker.start())

    def stop(self) -> None:
        try:
            self.run(self.broker.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    @property
    def port(self) -> int:
        return self.broker.listener_address.port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the broker's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(scaled(DEADLINE_S))

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call a function on the broker's loop."""

        async def work() -> Any:
            return function(*arguments)

        return self.run(work())

    @property
    def failures(self) -> dict[str, int]:
        """Failed authentications by reason."""
        return self.broker.server.counters.authentication_failures

    # Users

    def set_user(
        self,
        name: str,
        password: str,
        mechanisms: tuple[ScramMechanism, ...] = tuple(ScramMechanism),
        iterations: int = ITERATIONS_MIN,
    ) -> None:
        upsertions = [
            CredentialUpsertion(
                name,
                mechanism.kafka_type,
                iterations,
                SALT,
                salt_password(mechanism, password.encode(), SALT, iterations),
            )
            for mechanism in mechanisms
        ]
        users = self.broker.service.users
        errors = self.run(users.alter_each(upsertions, [], is_confidential=True, caller=OPERATOR))
        assert errors == {name: None}

    def delete_user(self, name: str) -> None:
        users = self.broker.service.users
        known = self.call(partial(users.describe, caller=OPERATOR), [name])[0].iterations
        deletions = [CredentialDeletion(name, mechanism.kafka_type) for mechanism in known]
        assert self.run(users.alter_each([], deletions, is_confidential=True, caller=OPERATOR)) == {
            name: None
        }


@contextmanager
def sasl_broker(directory: Path, /, **settings: Any) -> Iterator[SaslBroker]:
    made = SaslBroker(directory, **settings)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def shake(peer: RawPeer, mechanism: str, version: int = HANDSHAKE_VERSION) -> Struct:
    return peer.call(ApiKey.SASL_HANDSHAKE, version, {"mechanism": mechanism})


def send_token(peer: RawPeer, token: bytes, version: int = AUTHENTICATE_VERSION) -> Struct:
    return peer.call(ApiKey.SASL_AUTHENTICATE, version, {"auth_bytes": token})


def log_in(peer: RawPeer, mechanism: str, user: str, password: str, version: int = 2) -> Struct:
    """The last response of a log-in."""
    assert shake(peer, mechanism).error_code == 0
    if mechanism == PLAIN:
        return send_token(peer, f"\0{user}\0{password}".encode(), version)
    scram = ScramPeer(user, password, ScramMechanism(mechanism))
    challenge = send_token(peer, scram.first(), version)
    if challenge.error_code:
        return challenge
    last = send_token(peer, scram.final(challenge.auth_bytes), version)
    if not last.error_code:
        scram.verify(last.auth_bytes)
    return last
