"""`mansio dev-cluster --secure` with real processes: clients log in over TLS at any broker, etcd is closed to everybody
without a certificate, and certificates, passwords and leaders change without a failed produce."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from mansio import TopicPartition, blocking
from mansio.config.protected_start import FIRST_USER
from mansio.config.topic_names import AUDIT_TOPIC
from mansio.errors import (
    AuthenticationFailed,
    ClusterAuthorizationFailed,
    SaslAuthenticationFailed,
    TlsFailed,
)
from mansio.host.private_file import write_private_file
from mansio.net.tls.certificate_authority import CertificateAuthority, utc_now
from mansio.node.protected_start import LOCAL_NAMES
from mansio.state.authorization.roles import Role, acls_of_role
from support.certificates import Authority
from support.machine import scaled
from support.paths import mansio_command, required_tool
from support.process import inherited
from support.secure_producer import SecureProducer
from support.waiting import wait_until
from system.e2e.test_protected_start import SECTION, follow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEADLINE_S = 90
TOPIC = "protected"
NODES = (1, 2, 3)
NEW_PASSWORD = "the second password"
READY = re.compile(r"dev-cluster ready (.*)")


class SecureCluster:
    """A protected dev-cluster below `directory`, which was started, and what it prints."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        required_tool("etcd")
        self.data = directory / "cluster"
        self.security = self.data / "security"
        self.out, self.errors = directory / "out", directory / "errors"
        command = [*mansio_command(), "dev-cluster", "--secure", "--data", str(self.data), *arguments]
        with self.out.open("wb") as out, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=inherited()
            )

    def wait_ready(self) -> None:
        wait_until(
            lambda: "# mansio" in self.out.read_text() or self.process.poll() is not None,
            DEADLINE_S,
            "the cluster prints how to connect",
        )
        assert self.process.poll() is None, self.errors.read_text()

    @property
    def fields(self) -> dict[str, list[str]]:
        """The lists in the ready line, by name."""
        found = READY.search(self.out.read_text())
        assert found is not None
        return {name: text.split(",") for name, _, text in (word.partition("=") for word in found[1].split())}

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(self.fields["kafka"])

    @property
    def password(self) -> str:
        return (self.security / "admin.password").read_text().removesuffix("\n")

    def client(self, node_id: int, password: str | None = None) -> blocking.Client:
        """A client that knows this broker only."""
        return self.connect(self.fields["kafka"][node_id - 1], password=password or self.password)

    def connect(self, address: str, **security: Any) -> blocking.Client:
        known = {"tls": str(self.security / "ca.pem"), "user": FIRST_USER, **security}
        return blocking.connect(address, **known)

    def log(self, node_id: int) -> str:
        """What a broker has printed and logged."""
        return (self.data / f"broker-{node_id}.log").read_text()

    def pid(self, node_id: int) -> int:
        """The process of a broker, which may have been restarted."""
        return int(re.findall(r"^mansio .* ready .* pid=(\d+)$", self.log(node_id), re.MULTILINE)[-1])

    def create_topic(self) -> None:
        with self.client(1) as client:
            client.admin.create_topic(TOPIC, partitions=len(NODES), replication_factor=len(NODES))
        self.wait_in_sync()

    def wait_in_sync(self) -> None:
        """Every partition is led, and has all replicas in sync, as each broker knows."""

        def is_in_sync(client: blocking.Client) -> bool:
            found = client.admin.describe_topic(TOPIC).partitions
            return all(each.leader > 0 and len(each.in_sync_replicas) == len(NODES) for each in found)

        for node_id in NODES:
            with self.client(node_id) as client:
                wait_until(
                    lambda client=client: is_in_sync(client),
                    DEADLINE_S,
                    "all replicas are in sync",
                )

    def check_every_broker_serves(self) -> None:
        """Through each broker, records are produced to all leaders and received from all leaders."""
        for node_id in NODES:
            sent = {f"through {node_id} to {partition}".encode() for partition in range(len(NODES))}
            with self.client(node_id) as client:
                for partition, value in enumerate(sorted(sent)):
                    client.publish(TOPIC, value, partition=partition)
                client.admin.alter_group_config(f"g{node_id}", {"share.auto.offset.reset": "earliest"})
                received: set[bytes] = set()
                with client.receive(TOPIC, group=f"g{node_id}") as receiver:

                    def received_all(
                        receiver: Any = receiver, received: set[bytes] = received, sent: set[bytes] = sent
                    ) -> bool:
                        messages = receiver.poll(500)
                        received.update(each.value for each in messages)
                        receiver.ack(messages)
                        return sent <= received

                    wait_until(received_all, DEADLINE_S, f"records of all leaders through broker {node_id}")


@contextmanager
def secure_cluster(directory: Path, *arguments: str) -> Iterator[SecureCluster]:
    cluster = SecureCluster(directory, *arguments)
    try:
        cluster.wait_ready()
        yield cluster
        cluster.process.terminate()
        assert cluster.process.wait(scaled(DEADLINE_S)) == 0, cluster.errors.read_text()
    finally:
        if cluster.process.poll() is None:
            cluster.process.terminate()  # after a failure: it stops its children
            try:
                cluster.process.wait(scaled(DEADLINE_S))
            except subprocess.TimeoutExpired:
                cluster.process.kill()
                cluster.process.wait()
    for log in cluster.data.glob("broker-*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()[-6000:]


def test_records_are_produced_and_received_through_any_broker_over_tls_by_users_only(tmp_path: Path) -> None:
    required_tool("kcat")
    directory = tmp_path / "a user's files"  # the commands quote the paths
    directory.mkdir()
    with secure_cluster(directory) as cluster:
        cluster.create_topic()
        cluster.check_every_broker_serves()
        lines = dict(SECTION.findall(cluster.out.read_text()))
        assert list(lines) == ["mansio", "confluent-kafka", "kcat"]
        assert f"-b {cluster.bootstrap_servers} " in lines["mansio"]
        assert "3 brokers:" in follow(directory, lines["kcat"])
        for address in cluster.fields["kafka"]:
            with pytest.raises(AuthenticationFailed), cluster.connect(address, password="wrong"):
                pytest.fail("it logged in")
            with pytest.raises(AuthenticationFailed), cluster.connect(address, user=None):
                pytest.fail("it needed no user")
        with pytest.raises(TlsFailed), cluster.connect(address, tls=False, user=None):
            pytest.fail("it needed no TLS")
        check_every_broker_audits(cluster)
        assert "https://" in cluster.fields["etcd"][0]
        shown = "".join(
            path.read_text() for path in (cluster.out, cluster.errors, *cluster.data.glob("*.log"))
        )
        assert cluster.password not in shown
        assert "PRIVATE KEY" not in shown


def etcd_ports(cluster: SecureCluster) -> list[int]:
    """The ports of all members, for clients and for other members."""
    known = json.loads((cluster.data / "dev-cluster.json").read_text())["members"]
    return [port for pair in known for port in pair]


def ask_etcd(port: int, tls: ssl.SSLContext | None) -> bytes:
    """The first bytes of the answer to a request; none if it is refused."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=scaled(20)) as plain:
            connection = plain if tls is None else tls.wrap_socket(plain, server_hostname="127.0.0.1")
            with connection:
                connection.sendall(b"GET /health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                return connection.recv(12)
    except (ssl.SSLError, ConnectionError):
        return b""


def check_every_broker_audits(cluster: SecureCluster) -> None:
    """A user without rights is refused by each broker, and the topic of the audit has a line of each."""
    with cluster.client(1) as client:
        client.admin.users.create("guest", NEW_PASSWORD)
    for address in cluster.fields["kafka"]:

        def is_refused(address: str = address) -> bool:
            with contextlib.suppress(SaslAuthenticationFailed):  # the broker does not know the user yet
                with (
                    cluster.connect(address, user="guest", password=NEW_PASSWORD) as guest,
                    pytest.raises(ClusterAuthorizationFailed),
                ):
                    guest.admin.acls.list()
                return True
            return False

        wait_until(is_refused, DEADLINE_S, "the broker knows the user")

    with cluster.client(2) as client:

        def audited() -> set[int]:
            partition = TopicPartition(AUDIT_TOPIC, 0)
            end = client.admin.list_offsets([partition])[partition].offset
            records = client.consume(AUDIT_TOPIC, from_="earliest", max_records=end) if end else ()
            lines = [json.loads(record.value or b"") for record in records]
            of_guest = [line for line in lines if line["principal"] == "User:guest"]
            for line in of_guest:
                assert line["allow"] == "mansio acl add User:guest --operation DESCRIBE --cluster"
            return {line["broker"] for line in of_guest}

        wait_until(lambda: audited() == set(NODES), DEADLINE_S, "a line of each broker")


def check_etcd_refuses_all_without_a_certificate(cluster: SecureCluster, directory: Path) -> None:
    """Clients and other members, without a certificate, with one of another authority, and without TLS."""
    ca = cluster.security / "ca.pem"
    other = Authority(directory / "other").issue("mansio")
    known = ssl.create_default_context(cafile=ca)
    known.load_cert_chain(cluster.security / "broker-1.pem")
    foreign = ssl.create_default_context(cafile=ca)
    foreign.load_cert_chain(other.certificate, other.key)
    ports = etcd_ports(cluster)
    assert len(ports) == 6
    for port in ports:
        assert ask_etcd(port, known).startswith(b"HTTP/1.")
        assert ask_etcd(port, ssl.create_default_context(cafile=ca)) == b""
        assert ask_etcd(port, foreign) == b""
        answer = ask_etcd(port, None)
        assert answer in (b"", b"HTTP/1.0 400"), answer  # Go names the mistake, and closes the connection


def check_only_its_user_can_read_it(cluster: SecureCluster) -> None:
    """The directories of etcd and of the keys."""
    directories = [cluster.data / f"etcd-{number}" for number in (1, 2, 3)]
    directories += [each / "data" for each in directories]
    for directory in (*directories, cluster.security):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory
    names = {f"etcd-{number}.pem" for number in (1, 2, 3)} | {"broker-1.pem", "authority.pem", "ca.pem"}
    files = {path.name: path for path in cluster.security.iterdir()}
    assert set(files) == names | {"admin.password", "kcat.conf", "secrets.key"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}


@pytest.mark.full
def test_etcd_and_keys_are_closed_to_others_and_a_restart_keeps_files_users_and_passwords(
    tmp_path: Path,
) -> None:
    arguments = ("--brokers", "1", "--etcd-members", "3")
    with secure_cluster(tmp_path, *arguments) as cluster:
        check_etcd_refuses_all_without_a_certificate(cluster, tmp_path)
        check_only_its_user_can_read_it(cluster)
        kept = {path.name: path.read_bytes() for path in cluster.security.iterdir()}
        with cluster.client(1) as client:
            client.admin.users.create("other", NEW_PASSWORD)
            client.admin.acls.create(acls_of_role(Role.OPERATOR, "User:other", {}))
        with cluster.connect(cluster.bootstrap_servers, user="other", password=NEW_PASSWORD) as client:
            client.admin.users.set_password(FIRST_USER, NEW_PASSWORD)
    (cluster.data / "etcd-1").chmod(0o755)
    with secure_cluster(tmp_path, *arguments) as cluster:
        assert {path.name: path.read_bytes() for path in cluster.security.iterdir()} == kept
        check_only_its_user_can_read_it(cluster)
        assert "the password was changed" in cluster.errors.read_text()
        with cluster.client(1, NEW_PASSWORD) as client:
            client.admin.describe_cluster()


def presented(address: str, ca: Path, certificate: Path | None = None) -> bytes:
    """The certificate that a server presents, as PEM."""
    context = ssl.create_default_context(cafile=ca)
    if certificate is not None:
        context.load_cert_chain(certificate)
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=scaled(20)) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"").encode()


def issue(cluster: SecureCluster, name: str) -> bytes:
    """Replace a certificate by a new one of the same authority, with a new key; return it."""
    authority = CertificateAuthority((cluster.security / "authority.pem").read_bytes())
    pem = authority.issue(LOCAL_NAMES, utc_now())
    write_private_file(str(cluster.security / name), pem)
    return pem[pem.index(b"-----BEGIN CERTIFICATE") :]


@pytest.mark.full
def test_all_certificates_the_password_and_every_leader_change_under_load_without_a_failed_produce(
    tmp_path: Path,
) -> None:
    with secure_cluster(tmp_path, "--set", "broker_session_timeout_ms=3000") as cluster:
        ca, old_password = cluster.security / "ca.pem", cluster.password
        cluster.create_topic()

        def producing(name: str, password: str) -> SecureProducer:
            servers = cluster.bootstrap_servers
            return SecureProducer(servers, ca, TOPIC, name=name, user=FIRST_USER, password=password)

        with producing("first", old_password) as first:
            first.wait_for_more()
            issued = {node_id: issue(cluster, f"broker-{node_id}.pem") for node_id in NODES}
            for node_id in NODES:
                os.kill(cluster.pid(node_id), signal.SIGHUP)
                address = cluster.fields["kafka"][node_id - 1]
                wait_until(
                    lambda address=address, node_id=node_id: presented(address, ca) == issued[node_id],
                    DEADLINE_S,
                    f"broker {node_id} presents the new certificate",
                )
                first.wait_for_more()
            of_etcd = issue(cluster, "etcd-1.pem")  # etcd reads it for each connection
            etcd = cluster.fields["etcd"][0].removeprefix("https://")
            assert presented(etcd, ca, cluster.security / "broker-1.pem") == of_etcd
            with cluster.client(2, old_password) as client:
                client.admin.users.set_password(FIRST_USER, NEW_PASSWORD, previous_valid=timedelta(hours=1))
            write_private_file(str(cluster.security / "admin.password"), f"{NEW_PASSWORD}\n".encode())
            with producing("second", NEW_PASSWORD) as second:
                second.wait_for_more()
                for node_id in NODES:  # the next process of a broker has the new certificate for etcd, too
                    os.kill(cluster.pid(node_id), signal.SIGKILL)
                    wait_until(
                        lambda node_id=node_id: cluster.log(node_id).count(" ready kafka=") == 2,
                        DEADLINE_S,
                        f"broker {node_id} is ready again",
                    )
                    cluster.wait_in_sync()
                    first.wait_for_more()
                    second.wait_for_more()
        cluster.check_every_broker_serves()
        expected = first.acknowledged | second.acknowledged
        found: set[bytes] = set()
        with cluster.client(1) as client:
            wanted = len(expected) + len(NODES) ** 2
            for record in client.consume(TOPIC, from_="earliest", max_records=wanted):
                found.add(record.value or b"")
        assert expected <= found
        logs = "".join(cluster.log(node_id) for node_id in NODES)
        assert "broker_tls_failed" not in logs
        assert "tls_certificate_not_renewed" not in logs
