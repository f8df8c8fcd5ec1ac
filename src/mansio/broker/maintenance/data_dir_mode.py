"""Mode of a data directory: single node or cluster. A broker does not start with a directory of the other mode.

A single node keeps its metadata next to its logs, a cluster in etcd. In the wrong mode, for example without `--etcd`,
a broker would start without its topics, and clients would create them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.errors import ConfigError

if TYPE_CHECKING:
    from mansio.ports import Disk

SINGLE_NODE_FILE_NAME: Final = "metadata.sqlite3"
CLUSTER_FILE_NAME: Final = "broker.json"


def check_data_dir_mode(disk: Disk, data_dir: str, *, clustered: bool) -> None:
    """Raise `ConfigError` if the data directory was created in the other mode. `clustered`: the mode of this start."""
    if clustered and disk.exists(f"{data_dir}/{SINGLE_NODE_FILE_NAME}"):
        raise ConfigError(
            f"data_dir: {data_dir} contains the topics of a single-node broker, which cannot join a cluster: use an "
            f"empty directory, or start the broker without etcd"
        )
    if not clustered and disk.exists(f"{data_dir}/{CLUSTER_FILE_NAME}"):
        raise ConfigError(
            f"data_dir: {data_dir} belongs to a broker of a cluster: start the broker with --etcd or --join, or use "
            f"another directory"
        )
