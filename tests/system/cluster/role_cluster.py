"""The protected cluster and the users of "Roles" in docs/how-to/security.md, made with the commands of the page."""

from __future__ import annotations

import re
import shlex
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from support.documents import examples
from system.cluster.test_dev_cluster_secure import NODES, secure_cluster
from system.e2e.test_protected_start import SECTION, follow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from system.cluster.test_dev_cluster_secure import SecureCluster

PAGE: Final = "docs/how-to/security.md"
STARTS: Final = ("mansio", "dev-cluster", "--secure", "--brokers", "3", "--data", "./cluster")
BROKER_OF_THE_PAGE: Final = "127.0.0.1:9092"
FILES_OF_THE_PAGE: Final = "data/security"
READY: Final = re.compile(r"^mansio \S+ ready (.*)$", re.MULTILINE)

READER, WRITER, WORKER, OPERATOR = "billing", "shop", "packing", "olga"
TOPIC: Final = "orders"


class RoleCluster:
    """A protected cluster of three brokers that serve all protocols, and a user of each role."""

    def __init__(self, cluster: SecureCluster, directory: Path) -> None:
        """Store the context of the first user with the commands that the cluster has printed."""
        self.cluster = cluster
        self.directory = directory
        printed = dict(SECTION.findall(cluster.out.read_text()))["mansio"]
        follow(directory, printed.partition("mansio cluster ")[0])

    @property
    def ca(self) -> str:
        """File with the certificate of the authority."""
        return str(self.cluster.security / "ca.pem")

    def run_example(self, name: str) -> str:
        """Run an example of the page, with the addresses and the directory of this cluster; return what it prints."""
        code = "exec 2>&1\n" + examples(PAGE)[name].code.replace(
            BROKER_OF_THE_PAGE, self.cluster.bootstrap_servers
        )
        return follow(
            self.directory, code.replace(FILES_OF_THE_PAGE, shlex.quote(str(self.cluster.security)))
        )

    def password(self, user: str) -> str:
        return (self.directory / f"{user}.password").read_text().removesuffix("\n")

    def address(self, protocol: str, node_id: int) -> str:
        """Address of a listener by the name that the ready line of its broker has."""
        found = READY.search(self.cluster.log(node_id))
        assert found is not None
        return dict(word.split("=", 1) for word in found[1].split())[protocol]

    def addresses(self, protocol: str) -> list[str]:
        return [self.address(protocol, node_id) for node_id in NODES]

    def kafka(self, user: str) -> dict[str, Any]:
        """The settings of confluent-kafka."""
        return {
            "bootstrap.servers": self.cluster.bootstrap_servers,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": self.ca,
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": user,
            "sasl.password": self.password(user),
        }


@contextmanager
def role_cluster(directory: Path) -> Iterator[RoleCluster]:
    """Start the cluster as the page does."""
    words = shlex.split(examples(PAGE)["serve-all-protocols"].code.replace("\\\n", " "))
    assert tuple(words[: len(STARTS)]) == STARTS
    with secure_cluster(directory, "--brokers", "3", *words[len(STARTS) :]) as cluster:
        yield RoleCluster(cluster, directory)
