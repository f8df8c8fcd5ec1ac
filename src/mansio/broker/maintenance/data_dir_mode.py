"""Data directory mode: single node or cluster. A directory of one mode cannot be started in the other.

A single node keeps its metadata next to its logs, a cluster in etcd. Started in the wrong mode, for example without
`--etcd`, a broker would start without any of its topics, and clients would create them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.errors import ConfigError

if TYPE_CHECKING:
    from mansio.ports import Disk

SINGLE: Final = "metadata.sqlite3"
CLUSTERED: Final = "broker.json"


def check_data_dir_mode(disk: Disk, data_dir: str, *, clustered: bool) -> None:
    """Raise `ConfigError` for a directory of the other mode."""
    if clustered and disk.exists(f"{data_dir}/{SINGLE}"):
        raise ConfigError(
            f"data_dir: {data_dir} holds the topics of a single broker, which cannot become one of a cluster: take an "
            f"empty directory, or start it without etcd"
        )
    if not clustered and disk.exists(f"{data_dir}/{CLUSTERED}"):
        raise ConfigError(
            f"data_dir: {data_dir} belongs to a broker of a cluster: start it with --etcd or --join, as before, or "
            f"take another directory"
        )
