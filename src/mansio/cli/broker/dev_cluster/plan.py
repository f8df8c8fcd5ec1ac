"""Plan of the processes, directories and ports of `mansio dev-cluster`.

Invariants:
* Later runs in the same directory use the same ports, because etcd members store each other's addresses.
* Chosen ports are distinct, free when they are chosen, and below the range for outgoing connections.
* Later runs in the same directory are protected as the first one was: etcd members store whether their peers have TLS,
  and what only users could read does not become open to everybody.
"""

from __future__ import annotations

import glob
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mansio.cli.broker.config import SETTING_FLAGS
from mansio.config.cluster import MemberAddress
from mansio.config.protected_start import CA_FILE, SECURITY_DIRECTORY, protected_cluster_values
from mansio.config.sources import load_settings
from mansio.errors import ConfigError, DataDirectoryLocked
from mansio.host.disk import HostDisk
from mansio.host.free_ports import PortAllocator
from mansio.node.etcd_member.command import MemberPlan, TlsFiles

if TYPE_CHECKING:
    from collections.abc import Mapping

HOST: Final = "127.0.0.1"
PORTS_FILE_NAME: Final = "dev-cluster.json"
REPLICATION_FACTOR_MAX: Final = 3
OWN_SETTINGS: Final = frozenset(
    {
        "data_dir",
        "node_id",
        "listeners",
        "http_listener",
        "advertised_listeners",
        "etcd_endpoints",
        "etcd_join",
        "etcd_member",
    }
)
"""Settings that dev-cluster sets for each broker."""


@dataclass(frozen=True, slots=True)
class BrokerPlan:
    """One broker of the plan: node id, ports and data directory."""

    node_id: int
    kafka_port: int
    http_port: int
    directory: str

    @property
    def kafka(self) -> str:
        return f"{HOST}:{self.kafka_port}"

    @property
    def http(self) -> str:
        return f"{HOST}:{self.http_port}"

    @property
    def log_path(self) -> str:
        return f"{self.directory}.log"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """All processes of a dev-cluster. `settings` apply to every broker. `is_protected`: with TLS, and users log in."""

    directory: str
    members: tuple[MemberPlan, ...]
    brokers: tuple[BrokerPlan, ...]
    settings: Mapping[str, str]
    is_protected: bool = False

    @property
    def etcd(self) -> str:
        return ",".join(member.client_url for member in self.members)

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(broker.kafka for broker in self.brokers)

    @property
    def security_directory(self) -> str:
        """Directory of certificates and passwords, if the cluster is protected."""
        return f"{self.directory}/{SECURITY_DIRECTORY}"

    def values(self, broker: BrokerPlan) -> dict[str, str]:
        """Return the settings of a broker, by name. Raises `ConfigError` for a setting that contradicts protection."""
        values = {
            "node_id": str(broker.node_id),
            "data_dir": broker.directory,
            "listeners": broker.kafka,
            "http_listener": broker.http,
            "etcd_endpoints": self.etcd,
            **self.settings,
        }
        if self.is_protected:
            values |= protected_cluster_values(
                values, self.security_directory, broker_certificate(broker.node_id)
            )
        return values

    def arguments(self, broker: BrokerPlan) -> list[str]:
        """Return the arguments of the command `mansio` with which a broker is started."""
        arguments_list = ["serve"]
        for name, value in self.values(broker).items():
            flag = SETTING_FLAGS.get(name)
            arguments_list += ["--set", f"{name}={value}"] if flag is None else [flag, value]
        return [*arguments_list, "--dev"]


def broker_certificate(node_id: int) -> str:
    """Name of the file with the certificate of a broker."""
    return f"broker-{node_id}.pem"


def member_certificate(number: int) -> str:
    """Name of the file with the certificate of an etcd member."""
    return f"etcd-{number}.pem"


def mansio_command() -> list[str]:
    """Return the command line that runs `mansio` with this Python interpreter."""
    return [sys.executable, "-m", "mansio"]


def plan_cluster(
    directory: str,
    *,
    brokers: int,
    members: int,
    first_port: int | None,
    settings: Mapping[str, str],
    is_protected: bool = False,
) -> ClusterPlan:
    """Plan a cluster in `directory`, reusing an existing plan, and store the plan. Raises `ConfigError`."""
    replication = {"default_replication_factor": str(min(brokers, REPLICATION_FACTOR_MAX))}
    known = _read_ports(directory)
    if known["members"] and len(known["members"]) != members:
        raise ConfigError(
            f"--etcd-members: {directory} has {len(known['members'])} members; their number cannot be changed"
        )
    if known["members"] and known["is_protected"] != is_protected:
        made, wanted = ("with", "without") if known["is_protected"] else ("without", "with")
        raise ConfigError(
            f"--secure: {directory} was made {made} it, and cannot be used {wanted} it; use another --data"
        )
    ports = PortAllocator(HOST, "stop that process, or choose --first-port")
    etcd_ports = known["members"] or [[ports.allocate(), ports.allocate()] for _ in range(members)]
    for pair in known["members"]:
        ports.reserve(pair)
    broker_ports = []
    for index in range(brokers):
        before = known["brokers"][index] if index < len(known["brokers"]) else []
        if first_port is not None:
            before = [first_port + index, *before[1:]]
            ports.reserve(before[:1])
        kept = [ports.reuse(port) for port in before]
        broker_ports.append([*kept, *(ports.allocate() for _ in range(2 - len(kept)))])
    stored = {"members": etcd_ports, "brokers": [*broker_ports, *known["brokers"][brokers:]]}
    _write_ports(directory, {**stored, "is_protected": is_protected})
    return ClusterPlan(
        directory=directory,
        members=_member_plans(directory, etcd_ports, is_protected=is_protected),
        brokers=tuple(
            BrokerPlan(index, kafka, http, f"{directory}/broker-{index}")
            for index, (kafka, http) in enumerate(broker_ports, 1)
        ),
        settings={**replication, **settings},
        is_protected=is_protected,
    )


def _member_plans(directory: str, ports: list[list[int]], *, is_protected: bool) -> tuple[MemberPlan, ...]:
    members = tuple(sorted(MemberAddress(HOST, peer, client) for peer, client in ports))
    return tuple(
        MemberPlan(
            member,
            members,
            f"{directory}/etcd-{index}",
            HOST,
            tls=_member_tls(f"{directory}/{SECURITY_DIRECTORY}", index) if is_protected else None,
        )
        for index, member in enumerate(members, 1)
    )


def _member_tls(directory: str, number: int) -> TlsFiles:
    path = f"{directory}/{member_certificate(number)}"
    return TlsFiles(f"{directory}/{CA_FILE}", path, path)


def data_directories_in_use(directory: str) -> list[str]:
    """Return the brokers' data directories below `directory` that a running process has locked."""
    disk = HostDisk()
    locked = []
    for lock in sorted(glob.glob(f"{glob.escape(directory)}/broker-*/lock")):
        try:
            disk.lock(lock).release()
        except DataDirectoryLocked:
            locked.append(os.path.dirname(lock))
    return locked


def check_settings(settings: Mapping[str, str], *, is_protected: bool = False) -> None:
    """Raise `ConfigError` for an invalid setting, one that must differ between brokers, or one that contradicts
    protection."""
    for name in settings:
        if name in OWN_SETTINGS:
            raise ConfigError(f"{name}: set by dev-cluster, because it differs between brokers")
    scheme = "https" if is_protected else "http"
    values = {**settings, "listeners": f"{HOST}:9092", "etcd_endpoints": f"{scheme}://{HOST}:2379"}
    if is_protected:
        values |= protected_cluster_values(values, SECURITY_DIRECTORY, broker_certificate(1))
    load_settings(None, values, environment=False)


def _read_ports(directory: str) -> dict[str, Any]:
    path = f"{directory}/{PORTS_FILE_NAME}"
    if not os.path.exists(path):
        if os.path.isdir(directory) and os.listdir(directory):
            raise ConfigError(f"--data: {directory} is not empty and not the directory of a dev-cluster")
        return {"members": [], "brokers": [], "is_protected": False}
    try:
        with open(path, encoding="utf-8") as file:
            known = json.load(file)
        ports = {key: [[int(port) for port in pair] for pair in known[key]] for key in ("members", "brokers")}
        return {**ports, "is_protected": bool(known.get("is_protected", False))}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not written by dev-cluster") from error


def _write_ports(directory: str, known: Mapping[str, Any]) -> None:
    path = f"{directory}/{PORTS_FILE_NAME}"
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(known, file)
    os.replace(f"{path}.new", path)
