"""Mode of a data directory: single node or cluster. A broker does not start with a directory of the other mode.

A single node keeps its metadata next to its logs, a cluster in etcd. In the wrong mode, for example without `--etcd`,
a broker would start without its topics, and clients would create them again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import ConfigError
from mansio.host.atomic_file import write_file_atomically

if TYPE_CHECKING:
    from mansio.ports import Disk

SINGLE_NODE_FILE_NAME: Final = "metadata.sqlite3"
CLUSTER_FILE_NAME: Final = "broker.json"
PROCESSES_FILE_NAME: Final = "processes.json"
"""File in the directory of a node with several broker processes, which have directories of their own below it."""
SUPERVISOR_LOCK_FILE: Final = "supervisor.lock"
"""File that the supervisor of several broker processes locks in the node's directory."""
MOVED_FILE_NAME: Final = "moved.json"
"""File that states that the metadata of a single node was moved to a cluster. Then the directory is that of a broker of
the cluster."""


class MovedTo(NamedTuple):
    """Where the metadata of a single node was moved: the id of the cluster, and the node id of the broker in it."""

    cluster_id: str
    node_id: int


def check_data_dir_mode(disk: Disk, data_dir: str, *, clustered: bool) -> None:
    """Raise `ConfigError` if the data directory was created in the other mode. `clustered`: the mode of this start."""
    has_metadata = disk.exists(f"{data_dir}/{SINGLE_NODE_FILE_NAME}")
    moved_to = read_moved_to(disk, data_dir)
    if clustered:
        if has_metadata and moved_to is None:
            raise ConfigError(
                f"data_dir: {data_dir} contains the topics of a single-node broker, which cannot join a cluster: use "
                f"an empty directory, or start the broker without etcd"
            )
        return
    if moved_to is not None:
        raise moved_error(data_dir, moved_to.cluster_id)
    if not has_metadata and disk.exists(f"{data_dir}/{PROCESSES_FILE_NAME}"):
        raise ConfigError(
            f"data_dir: {data_dir} belongs to several broker processes: start them with --processes, or use another "
            f"directory"
        )
    if disk.exists(f"{data_dir}/{CLUSTER_FILE_NAME}"):
        raise ConfigError(
            f"data_dir: {data_dir} belongs to a broker of a cluster: start the broker with --etcd or --join, or use "
            f"another directory"
        )


def moved_error(data_dir: str, cluster_id: str) -> ConfigError:
    """Return the error for the directory of a single node whose metadata was moved to a cluster."""
    return ConfigError(
        f"data_dir: the metadata of {data_dir} was moved to the cluster {cluster_id} of several broker processes: "
        f"start them with --processes"
    )


def read_moved_to(disk: Disk, data_dir: str) -> MovedTo | None:
    """Return where the metadata of a single node was moved; None if it was not. Raises `ConfigError` if the file that
    has it is damaged."""
    path = f"{data_dir}/{MOVED_FILE_NAME}"
    if not disk.exists(path):
        return None
    try:
        found = json.loads(disk.read_file(path))
        return MovedTo(str(found["cluster_id"]), int(found["node_id"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged") from error


def cluster_of(disk: Disk, data_dir: str) -> str | None:
    """Return the id of the cluster to which the directory belongs; None if it belongs to none. Raises `ConfigError` if
    the file that has it is damaged."""
    path = f"{data_dir}/{CLUSTER_FILE_NAME}"
    if not disk.exists(path):
        moved_to = read_moved_to(disk, data_dir)
        return None if moved_to is None else moved_to.cluster_id
    try:
        return str(json.loads(disk.read_file(path))["cluster_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged") from error


def write_moved_to(disk: Disk, data_dir: str, moved_to: MovedTo) -> None:
    """Record, durably, where the metadata of a single node was moved. Raises `OSError`."""
    write_file_atomically(
        disk, f"{data_dir}/{MOVED_FILE_NAME}", json.dumps(moved_to._asdict()).encode() + b"\n"
    )
