"""Broker processes with passwords and TLS for clients, and TLS between brokers: every certificate, the authority and
every password are replaced, and a leader dies, while clients produce; no produce fails, and no acknowledged record is
missing. Brokers reach each other for clients of HTTP, too.
"""

from __future__ import annotations

import os
import shutil
import signal
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from mansio import blocking
from support.certificates import Authority, Certificate
from support.cluster import Cluster, cluster
from support.machine import scaled
from support.paths import free_port
from support.secure_producer import SecureProducer
from system.cluster.load import create_topic

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from support.process import ServedBroker

pytestmark = pytest.mark.full

NODES = (1, 2, 3)
TOPIC = "renewed"
USER, OLD_PASSWORD, NEW_PASSWORD = "alice", "the first password", "the second password"
DEADLINE_S = 60


class Files:
    """Certificates of three brokers on disk, and what clients trust. `protocol`: of the listener between brokers."""

    def __init__(self, directory: Path, protocol: str) -> None:
        self._directory = directory
        self._protocol = protocol
        self.old = Authority(directory / "old", "Old CA")
        self.new = Authority(directory / "new", "New CA")
        self.both = directory / "both.pem"
        """For clients: trusted during the whole change."""
        self.both.write_bytes(self.old.certificate.read_bytes() + self.new.certificate.read_bytes())
        self.ports = {node_id: (free_port(), free_port()) for node_id in NODES}
        """Of the listeners CLIENTS and INTERNAL."""
        for node_id in NODES:
            self.trust(node_id, self.old.certificate)
            self.install(node_id, self.old)

    def ca(self, node_id: int) -> Path:
        return self._directory / f"ca-{node_id}.pem"

    def own(self, node_id: int) -> Certificate:
        return Certificate(self._directory / f"{node_id}.pem", self._directory / f"{node_id}.key")

    def trust(self, node_id: int, authorities: Path) -> None:
        _replace(authorities, self.ca(node_id))

    def install(self, node_id: int, authority: Authority) -> None:
        for source, target in zip(authority.issue(f"broker-{node_id}"), self.own(node_id), strict=True):
            _replace(source, target)

    def settings(self, node_id: int, broker: ServedBroker) -> dict[str, Any]:
        """PLAINTEXT is the open listener of the test."""
        clients, internal = self.ports[node_id]
        is_open = self._protocol == "SSL"
        return {
            "listeners": f"PLAINTEXT://{broker.bootstrap_servers},CLIENTS://127.0.0.1:{clients},"
            f"INTERNAL://127.0.0.1:{internal}",
            "listener_security_protocol_map": f"PLAINTEXT:PLAINTEXT,CLIENTS:SASL_SSL,INTERNAL:{self._protocol}",
            "inter_broker_listener_name": "INTERNAL",
            "open_listeners": "PLAINTEXT,INTERNAL" if is_open else "PLAINTEXT,http",
            "ssl_certificate_location": self.own(node_id).certificate,
            "ssl_key_location": self.own(node_id).key,
            "ssl_ca_location": self.ca(node_id),
            "ssl_client_auth": "requested" if is_open else "none",
        }

    def client(self, node_id: int, password: str, ca: Path | None = None) -> blocking.Client:
        return blocking.connect(
            f"127.0.0.1:{self.ports[node_id][0]}", tls=str(ca or self.both), user=USER, password=password
        )


def _replace(source: Path, target: Path) -> None:
    partial = target.with_suffix(".partial")
    shutil.copy(source, partial)
    os.replace(partial, target)


def producing(files: Files, name: str, password: str) -> SecureProducer:
    """A client that trusts both authorities."""
    servers = ",".join(f"127.0.0.1:{files.ports[node_id][0]}" for node_id in NODES)
    return SecureProducer(servers, files.both, TOPIC, name=name, user=USER, password=password)


def reload(one: Cluster, node_id: int) -> None:
    """Let a broker read its files again (SIGHUP), and wait until it uses them."""
    broker = one.brokers[node_id]
    before = broker.text().count("tls_certificate_renewed")
    broker.signal(signal.SIGHUP)
    one.wait(lambda: broker.text().count("tls_certificate_renewed") > before, "the files were read")
    assert "tls_certificate_not_renewed" not in broker.text()


def restart(one: Cluster, node_id: int) -> None:
    """So that it connects to the others, and they to it, with what all have now."""
    assert one.brokers[node_id].stop() == 0
    one.start(node_id)
    one.wait_in_sync(TOPIC)


def check_complete(files: Files, wanted: Mapping[int, set[bytes]]) -> None:
    """Every acknowledged record is there, for a client that trusts the new authority only, through any broker."""
    expected = set().union(*wanted.values())
    with files.client(3, NEW_PASSWORD, files.new.certificate) as client:
        found: set[bytes] = set()
        for record in client.consume(TOPIC, group="reader", max_records=len(expected)):
            found.add(record.value or b"")
    assert expected <= found


def test_every_certificate_the_authority_and_the_password_change_under_load_without_a_failed_produce(
    tmp_path: Path,
) -> None:
    files = Files(tmp_path, "SSL")
    with cluster(tmp_path, broker_settings=files.settings, broker_session_timeout_ms=6_000) as one:
        with blocking.connect(one.bootstrap_servers) as client:
            client.admin.users.create(USER, OLD_PASSWORD)
        create_topic(one, TOPIC, partitions=3)
        with producing(files, "first", OLD_PASSWORD) as first:
            first.wait_for_more()
            for node_id in NODES:
                files.install(node_id, files.old)
                reload(one, node_id)
            first.wait_for_more()
            for node_id in NODES:
                files.trust(node_id, files.both)
                reload(one, node_id)
            for node_id in NODES:
                files.install(node_id, files.new)
                reload(one, node_id)
                if node_id == 2:  # brokers of the old and of the new authority connect to each other
                    restart(one, 1)
            first.wait_for_more()
            for node_id in NODES:
                files.trust(node_id, files.new.certificate)
                reload(one, node_id)
            with files.client(2, OLD_PASSWORD) as client:
                client.admin.users.set_password(USER, NEW_PASSWORD, previous_valid=timedelta(hours=1))
            with producing(files, "second", NEW_PASSWORD) as second:
                second.wait_for_more()
                dead = one.leader(TOPIC)
                one.kill(dead)
                one.wait_led_by_others([TOPIC], dead, DEADLINE_S)
                first.wait_for_more()
                second.wait_for_more()
                one.start(dead)
                one.wait_in_sync(TOPIC)
        check_complete(files, {1: first.acknowledged, 2: second.acknowledged})
        for node_id in NODES:  # through any broker, whoever leads
            with (
                files.client(node_id, NEW_PASSWORD) as client,
                client.receive(TOPIC, group=f"through-{node_id}") as receiver,
            ):
                received: set[int] = set()

                def has_received(
                    client: Any = client, receiver: Any = receiver, received: set[int] = received
                ) -> bool:
                    for partition in range(3):
                        client.publish(TOPIC, b"later", partition=partition)
                    messages = receiver.poll(200)
                    received.update(each.partition for each in messages)
                    receiver.ack(messages)
                    return received == {0, 1, 2}

                one.wait(has_received, "records of all leaders", DEADLINE_S)
        one.check_logs()
        assert "broker_tls_failed" not in "".join(broker.text() for broker in one.brokers.values())


def test_http_of_any_broker_reaches_the_others_through_a_listener_where_clients_log_in(
    tmp_path: Path,
) -> None:
    """The connection on which a broker learns the version of another one is authenticated, too: the listener would
    close it, and count a client that did not log in."""
    files = Files(tmp_path, "SASL_SSL")
    with cluster(
        tmp_path, brokers=2, http=True, broker_settings=files.settings, authentication_timeout_ms=600_000
    ) as one:
        create_topic(one, TOPIC, partitions=2, copies=2)
        assert {one.leader(TOPIC, partition) for partition in (0, 1)} == {1, 2}
        with httpx.Client(timeout=scaled(30)) as http:
            for broker in one.brokers.values():
                topic = f"{broker.http_url}/v1/topics/{TOPIC}"
                for partition in (0, 1):
                    posted = http.post(f"{topic}/records?partition={partition}", json="routed")
                    assert posted.status_code == 200, posted.text
                    found = http.get(f"{topic}/partitions/{partition}/records").json()["records"]
                    assert {each["value"] for each in found} == {'"routed"'}

            def unauthenticated() -> list[str]:
                pages = (http.get(f"{broker.http_url}/metrics").text for broker in one.brokers.values())
                return [
                    line
                    for page in pages
                    for line in page.splitlines()
                    if line.startswith("mansio_unauthenticated_connections")
                ]

            assert len(unauthenticated()) == 2
            one.wait(
                lambda: all(line.endswith(" 0.0") for line in unauthenticated()), "all are authenticated"
            )
        one.check_logs()
