"""Command line of an etcd member, computed from a `MemberPlan`.

Invariants:
* A member listens only on the address of its entry in `etcd_join`, or on `etcd_listen_host`.
* All members get the same list of members in the same order.
* etcd compacts old revisions, so that the database does not grow with every change.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mansio.config.cluster import url_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.config.cluster import MemberAddress

REVISIONS_KEPT: Final = 20_000
"""Number of revisions that etcd keeps. A broker that was disconnected for longer lists all keys again."""

DATABASE_BYTES_MAX: Final = 2 << 30
SNAPSHOT_ENTRIES: Final = 10_000
"""Number of Raft entries between two snapshots of etcd, which bounds the write-ahead log that a start reads."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of a member's PEM files. The same certificate is used for clients and for the other members."""

    ca_file: str
    cert_file: str
    key_file: str


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """Plan of one etcd member: its entry in `members`, its directory and its listen address.

    `initial_cluster_state` is etcd's option of that name: "new", or "existing" for a member that joins a running etcd.
    """

    own_address: MemberAddress
    members: tuple[MemberAddress, ...]
    directory: str
    listen_host: str
    """IP address on which the member listens; etcd rejects host names."""
    initial_cluster_state: str = "new"
    tls: TlsFiles | None = None

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    @property
    def client_url(self) -> str:
        """URL at which clients reach the member."""
        return self.own_address.client_url(self.scheme)

    @property
    def data_directory(self) -> str:
        return f"{self.directory}/data"

    @property
    def log_path(self) -> str:
        return f"{self.directory}/etcd.log"


def arguments(plan: MemberPlan) -> list[str]:
    """Return the command line arguments of etcd, without the program's name."""
    own, scheme = plan.own_address, plan.scheme
    listen = f"{scheme}://{url_host(plan.listen_host)}"
    all_members = ",".join(f"{member.name}={member.peer_url(scheme)}" for member in plan.members)
    given = {
        "name": own.name,
        "data-dir": plan.data_directory,
        "listen-peer-urls": f"{listen}:{own.peer_port}",
        "listen-client-urls": f"{listen}:{own.client_port}",
        "initial-advertise-peer-urls": own.peer_url(scheme),
        "advertise-client-urls": plan.client_url,
        "initial-cluster": all_members,
        "initial-cluster-state": plan.initial_cluster_state,
        "initial-cluster-token": _cluster_token(plan.members),
        "pre-vote": "true",  # a member that was disconnected does not depose the leader when it returns
        "auto-compaction-mode": "revision",
        "auto-compaction-retention": str(REVISIONS_KEPT),
        "quota-backend-bytes": str(DATABASE_BYTES_MAX),
        "snapshot-count": str(SNAPSHOT_ENTRIES),
        "logger": "zap",
        "log-outputs": "stderr",
        "log-level": "warn",
    }
    if plan.tls is not None:
        given |= _tls_arguments(plan.tls)
    return [f"--{name}={value}" for name, value in given.items()]


def _cluster_token(members: Sequence[MemberAddress]) -> str:
    """Return a token that depends on the member names, so that a member never joins an etcd with other members."""
    names = ",".join(member.name for member in members)
    return f"mansio-{hashlib.sha256(names.encode()).hexdigest()[:12]}"


def _tls_arguments(tls: TlsFiles) -> dict[str, str]:
    return {
        "cert-file": tls.cert_file,
        "key-file": tls.key_file,
        "trusted-ca-file": tls.ca_file,
        "client-cert-auth": "true",
        "peer-cert-file": tls.cert_file,
        "peer-key-file": tls.key_file,
        "peer-trusted-ca-file": tls.ca_file,
        "peer-client-cert-auth": "true",
    }
