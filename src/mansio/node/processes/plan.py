"""Plan of a node with several broker processes: their directories, node ids, ports and settings.

The file `processes.json` in the node's directory has what must stay the same from start to start: the directory of
each process, the first node id, and the ports of the etcd member.

Invariants:
* A process keeps its node id and its directory. A later start has the same processes, or more; those that are missing
  had no replicas any more.
* No two processes need the same port, but for those that they share.
* Nothing is written before the whole plan is valid.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.broker.maintenance.data_dir_mode import (
    CLUSTER_FILE_NAME,
    PROCESSES_FILE_NAME,
    SINGLE_NODE_FILE_NAME,
    read_moved_to,
)
from mansio.config.addresses import WILDCARD_HOSTS, Address, is_loopback_host, parse_address
from mansio.config.cluster import MemberAddress
from mansio.config.listeners import format_listeners, parse_listeners
from mansio.config.settings import Origin
from mansio.errors import ConfigError
from mansio.host.atomic_file import write_file_atomically
from mansio.host.free_ports import PortAllocator
from mansio.node.etcd_member.command import MemberPlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.config.settings import Settings
    from mansio.ports import Disk

MEMBER_HOST: Final = "127.0.0.1"
"""Address of the etcd member that a supervisor runs for its own brokers."""
OWN_DIRECTORY: Final = "."
"""Name of the node's own directory in a layout."""
PORT_MAX: Final = 65_535
PROCESSES_ROOM: Final = 64
"""Number of processes for whose ports there is room when the etcd member gets its own."""
SHARED_LISTENERS: Final = ("http_listener", "registry_listener", "grpc_listener", "sqs_listener")


class Layout(NamedTuple):
    """What stays the same from start to start. `directories`: of each process, below the node's directory.
    `member_ports`: the ports of the etcd member for its peers and its clients; None if the supervisor runs none of its
    own."""

    directories: tuple[str, ...]
    first_node_id: int
    member_ports: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One broker process. `changes`: its settings that are not those of the supervisor, by name."""

    node_id: int
    directory: str
    changes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NodePlan:
    """All processes of a node. `leaving`: node ids of earlier processes that are not started any more. `member`: of
    the etcd that the supervisor runs for its own brokers alone, or None. `imports`: whether the metadata of a single
    node is moved to etcd first."""

    directory: str
    layout: Layout
    processes: tuple[ProcessPlan, ...]
    leaving: tuple[int, ...]
    member: MemberPlan | None
    imports: bool = False

    @property
    def layout_path(self) -> str:
        return f"{self.directory}/{PROCESSES_FILE_NAME}"


def plan_node(disk: Disk, settings: Settings, count: int) -> NodePlan:
    """Plan `count` processes with the settings of the supervisor. Raises `ConfigError`."""
    directory = settings.data_dir
    known = read_layout(disk, directory)
    _check_directory(disk, directory, known)
    _check_member(settings, known)
    _check_supervisor_listener(settings)
    first_node_id = _first_node_id(settings, known)
    is_single_node = disk.exists(f"{directory}/{SINGLE_NODE_FILE_NAME}")
    directories: tuple[str, ...] = (OWN_DIRECTORY,) if is_single_node else ("0",)
    if known is not None:
        directories = known.directories
    directories += tuple(str(number) for number in range(len(directories), count))
    ports = PortAllocator(MEMBER_HOST, "stop that process")
    ports.exclude(_own_ports(settings, max(count, PROCESSES_ROOM)))
    member_ports = None
    if not settings.clustered:
        member_ports = None if known is None else known.member_ports
        ports.exclude(member_ports or ())
        member_ports = member_ports or (ports.allocate(), ports.allocate())
    layout = Layout(directories, first_node_id, member_ports)
    member = None
    if not settings.clustered:
        assert member_ports is not None
        address = MemberAddress(MEMBER_HOST, *member_ports)
        member = MemberPlan(address, (address,), f"{directory}/etcd", MEMBER_HOST)
    shared = _shared_values(settings, member, ports)
    _check_ports(settings, count)
    if member_ports is not None:
        _check_member_ports(settings, count, member_ports)
    processes = tuple(
        ProcessPlan(
            first_node_id + number,
            directory_of(directory, directories[number]),
            {**shared, **_own_values(settings, first_node_id, directories, number)},
        )
        for number in range(count)
    )
    leaving = tuple(first_node_id + number for number in range(count, len(directories)))
    imports = is_single_node and read_moved_to(disk, directory) is None
    return NodePlan(directory, layout, processes, leaving, member, imports)


def directory_of(node_directory: str, name: str) -> str:
    """Return the data directory of a process. That of the first one is the node's own directory where it was that of
    a single node."""
    return node_directory if name == OWN_DIRECTORY else f"{node_directory}/{name}"


def _check_directory(disk: Disk, directory: str, known: Layout | None) -> None:
    if known is not None:
        return
    if (moved_to := read_moved_to(disk, directory)) is not None:
        raise ConfigError(
            f"data_dir: {directory} was moved to the cluster {moved_to.cluster_id}, and {PROCESSES_FILE_NAME} "
            "is missing"
        )
    if disk.exists(f"{directory}/{CLUSTER_FILE_NAME}"):
        raise ConfigError(
            f"data_dir: {directory} belongs to one broker of a cluster: start it without --processes, or use another "
            "directory"
        )


def _check_member(settings: Settings, known: Layout | None) -> None:
    """Raise `ConfigError` if the metadata is in another etcd, or the member would be open to more than the
    listeners are."""
    if settings.clustered:
        return
    if known is not None and known.member_ports is None:
        raise ConfigError(
            f"etcd_endpoints: the metadata of {settings.data_dir} is in an etcd that was named with --etcd or --join: "
            "name it again"
        )
    if settings.authorizer != "none" or any(each.is_authenticated for each in settings.served_listeners):
        raise ConfigError(
            "etcd_endpoints: the etcd member that --processes runs is open to all users of this machine, and the "
            "listeners are not: name an etcd with TLS (--etcd https://HOST:PORT)"
        )


def _check_supervisor_listener(settings: Settings) -> None:
    address = settings.supervisor_address
    if address is not None and not is_loopback_host(address.host) and not settings.insecure_listen:
        raise ConfigError(
            f"supervisor_listener: {address} is reached by other machines, and does not authenticate its clients: use "
            "an address on loopback, or set insecure_listen=true"
        )


def _first_node_id(settings: Settings, known: Layout | None) -> int:
    if known is None:
        return settings.node_id
    if settings.origin("node_id") is not Origin.DEFAULT and settings.node_id != known.first_node_id:
        raise ConfigError(
            f"node_id: the brokers in {settings.data_dir} have ids from {known.first_node_id} on, not from "
            f"{settings.node_id}"
        )
    return known.first_node_id


def _shared_values(settings: Settings, member: MemberPlan | None, ports: PortAllocator) -> dict[str, str]:
    """Return the settings that are the same for all processes, and not those of the supervisor."""
    values = {
        "share_ports": "true",
        "broker_host_label": settings.broker_host_label or socket.gethostname(),
        "etcd_endpoints": ",".join(settings.etcd_urls) if member is None else member.client_url,
    }
    if settings.etcd_join:
        values |= {"etcd_join": "", "etcd_member": ""}
    if member is not None:
        values["default_replication_factor"] = "1"  # there is one host, and no other one can join
    for name in SHARED_LISTENERS:
        text = getattr(settings, name)
        host, _, port = text.rpartition(":")
        if port == "0":
            values[name] = f"{host}:{ports.allocate()}"
    return values


def _own_values(
    settings: Settings, first_node_id: int, directories: tuple[str, ...], number: int
) -> dict[str, str]:
    values = {
        "node_id": str(first_node_id + number),
        "data_dir": directory_of(settings.data_dir, directories[number]),
        "listeners": _moved("listeners", settings.listeners, number),
    }
    if settings.advertised_listeners:
        values["advertised_listeners"] = _moved("advertised_listeners", settings.advertised_listeners, number)
    if settings.audit_log:
        values["audit_log"] = f"{settings.audit_log}.{first_node_id + number}"
    return values


def _moved(setting: str, text: str, number: int) -> str:
    """Return listeners whose ports are higher by `number`; port 0 stays."""
    addresses = parse_listeners(setting, text)
    return format_listeners({name: _moved_address(each, number) for name, each in addresses.items()})


def _moved_address(address: Address, number: int) -> Address:
    return Address(address.host, address.port + number if address.port else 0)


def _own_ports(settings: Settings, count: int) -> set[int]:
    """Return the ports that the settings name."""
    shared = (
        settings.http_address,
        settings.registry_address,
        settings.grpc_address,
        settings.sqs_address,
        settings.supervisor_address,
    )
    ports = {address.port for address in shared if address is not None}
    for address in parse_listeners("listeners", settings.listeners).values():
        ports |= set(range(address.port, address.port + count))
    return ports


def _is_same_address(one: Address, other: Address) -> bool:
    hosts = {one.host, other.host}
    return one.port == other.port and (len(hosts) == 1 or not hosts.isdisjoint(WILDCARD_HOSTS))


def _check_ports(settings: Settings, count: int) -> None:
    """Raise `ConfigError` if two processes would need the same port, or one that does not exist."""
    owners: dict[tuple[int, str], str] = {}
    for name, address in parse_listeners("listeners", settings.listeners).items():
        if not address.port:
            continue
        if address.port + count - 1 > PORT_MAX:
            raise ConfigError(
                f"listeners: {count} processes need ports from {address.port} to {PORT_MAX + 1}"
            )
        for port in range(address.port, address.port + count):
            other = owners.setdefault((port, address.host), name)
            if other != name:
                raise ConfigError(
                    f"listeners: {count} processes need consecutive ports, and {other} and {name} would both have "
                    f"port {port}: leave more room between them"
                )
    for name in (*SHARED_LISTENERS, "supervisor_listener"):
        text = getattr(settings, name)
        port = int(text.rpartition(":")[2] or 0)
        if any(port == taken for taken, _ in owners):
            raise ConfigError(
                f"{name}: port {port} is needed by one of {count} processes for the Kafka protocol: choose another one"
            )
    supervisor = settings.supervisor_address
    if supervisor is None or not supervisor.port:
        return
    for name in SHARED_LISTENERS:
        text = getattr(settings, name)
        if text and _is_same_address(parse_address(name, text), supervisor):
            raise ConfigError(
                f"supervisor_listener: {supervisor} is the address of {name}, too: choose another one"
            )


def _check_member_ports(settings: Settings, count: int, member_ports: tuple[int, int]) -> None:
    """Raise `ConfigError` if a listener needs a port of the etcd member, which keeps its ports."""
    for port in member_ports:
        if port in _own_ports(settings, count):
            raise ConfigError(
                f"listeners: port {port}, which {count} processes need for the listeners, is that of etcd in "
                f"{settings.data_dir}: choose other ones"
            )


# -- the layout --------


def read_layout(disk: Disk, directory: str) -> Layout | None:
    """Return the layout of a node's directory; None if it has none. Raises `ConfigError` if it is damaged."""
    path = f"{directory}/{PROCESSES_FILE_NAME}"
    if not disk.exists(path):
        return None
    try:
        known: dict[str, Any] = json.loads(disk.read_file(path))
        ports = known["member_ports"]
        return Layout(
            tuple(str(each) for each in known["directories"]),
            int(known["first_node_id"]),
            None if ports is None else (int(ports[0]), int(ports[1])),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path} is damaged: it is not what --processes writes") from error


def write_layout(disk: Disk, directory: str, layout: Layout) -> None:
    """Write the layout, durably. Raises `OSError`."""
    write_file_atomically(
        disk, f"{directory}/{PROCESSES_FILE_NAME}", json.dumps(layout._asdict()).encode() + b"\n"
    )


def without_leaving(plan: NodePlan) -> Layout:
    """Return the layout without the processes that are not started any more."""
    return plan.layout._replace(directories=plan.layout.directories[: len(plan.processes)])
