"""The authority of a protected cluster is replaced under load, one process after the other, as "Security" describes."""

from __future__ import annotations

import os
import signal
import ssl
from typing import TYPE_CHECKING

import psutil

from mansio.config.protected_start import FIRST_USER
from mansio.host.private_file import write_private_file
from mansio.net.tls.certificate_authority import CertificateAuthority, utc_now
from support.secure_producer import SecureProducer
from support.waiting import wait_until
from system.cluster.test_dev_cluster_secure import (
    DEADLINE_S,
    NODES,
    TOPIC,
    SecureCluster,
    ask_etcd,
    etcd_ports,
    issue,
    presented,
    secure_cluster,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MEMBERS = (1, 2, 3)


class Replacement:
    """The steps, each of which leaves the cluster whole. `check`: called after each change of one process."""

    def __init__(self, cluster: SecureCluster, check: Callable[[], None]) -> None:
        self.cluster = cluster
        self.check = check

    def trust(self, authorities: bytes) -> None:
        """Let all processes trust these: brokers read them on SIGHUP for each other, and at their start for etcd."""
        write_private_file(str(self.cluster.security / "ca.pem"), authorities)
        self.reload()
        for number in MEMBERS:
            self.restart_member(number)
        self.restart_brokers()

    def issue_all(self) -> None:
        """Let all processes have certificates of the authority in the file."""
        names = [f"broker-{node_id}.pem" for node_id in NODES] + [f"etcd-{number}.pem" for number in MEMBERS]
        for name in names:
            issue(self.cluster, name)
        self.reload()
        self.restart_brokers()

    def reload(self) -> None:
        for node_id in NODES:
            count = self.cluster.log(node_id).count("tls_certificate_renewed")
            os.kill(self.cluster.pid(node_id), signal.SIGHUP)
            wait_until(
                lambda node_id=node_id, count=count: (
                    self.cluster.log(node_id).count("tls_certificate_renewed") > count
                ),
                DEADLINE_S,
                f"broker {node_id} has read the files",
            )
            self.check()

    def restart_member(self, number: int) -> None:
        """Kill a member of etcd, and return when it answers again, as part of a majority."""
        directory = str(self.cluster.data / f"etcd-{number}/data")
        (process,) = [
            each
            for each in psutil.Process(self.cluster.process.pid).children()
            if f"--data-dir={directory}" in each.cmdline()
        ]
        process.kill()
        wait_until(lambda: not process.is_running(), DEADLINE_S, "it has ended")
        context = ssl.create_default_context(cafile=self.cluster.security / "ca.pem")
        context.load_cert_chain(self.cluster.security / "broker-1.pem")
        for port in etcd_ports(self.cluster)[1::2]:  # those for clients
            wait_until(
                lambda port=port: ask_etcd(port, context) == b"HTTP/1.0 200", DEADLINE_S, "all members answer"
            )
        self.check()

    def restart_brokers(self) -> None:
        for node_id in NODES:
            count = self.cluster.log(node_id).count(" ready kafka=")
            os.kill(self.cluster.pid(node_id), signal.SIGKILL)
            wait_until(
                lambda node_id=node_id, count=count: self.cluster.log(node_id).count(" ready kafka=") > count,
                DEADLINE_S,
                f"broker {node_id} is ready again",
            )
            self.cluster.wait_in_sync()
            self.check()


def test_the_authority_of_brokers_and_etcd_is_replaced_under_load_without_a_failed_produce(
    tmp_path: Path,
) -> None:
    arguments = ("--etcd-members", "3", "--set", "broker_session_timeout_ms=3000")
    with secure_cluster(tmp_path, *arguments) as cluster:
        cluster.create_topic()
        old = (cluster.security / "ca.pem").read_bytes()
        authority = CertificateAuthority.create(utc_now())
        both = tmp_path / "both.pem"
        both.write_bytes(old + authority.certificate)
        producer = SecureProducer(
            cluster.bootstrap_servers, both, TOPIC, name="p", user=FIRST_USER, password=cluster.password
        )
        with producer:
            producer.wait_for_more()
            replacement = Replacement(cluster, producer.wait_for_more)
            replacement.trust(both.read_bytes())
            write_private_file(str(cluster.security / "authority.pem"), authority.pem)
            replacement.issue_all()
            replacement.trust(authority.certificate)
        only_new = tmp_path / "new.pem"
        only_new.write_bytes(authority.certificate)
        for address in cluster.fields["kafka"]:
            presented(address, only_new)
        for url in cluster.fields["etcd"]:
            presented(url.removeprefix("https://"), only_new, cluster.security / "broker-1.pem")
        cluster.check_every_broker_serves()
        logs = "".join(cluster.log(node_id) for node_id in NODES)
        assert "broker_tls_failed" not in logs
