"""Command line of an etcd member. Pure: a plan in, arguments out.

Invariants:
* A member listens on the one address of its entry in `etcd_join`, which is loopback unless the operator configured
  another.
* All members receive the same list in the same order.
* History is compacted, so that the database does not grow with every change.
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
"""Revisions that a broker which was disconnected can still receive by a watch; older changes are listed again."""

DATABASE_BYTES_MAX: Final = 2 << 30
SNAPSHOT_AFTER: Final = 10_000
"""Raft entries between snapshots: bounds the write-ahead log that a start reads."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificates of a member, PEM. The same one is used for clients and for the other members."""

    ca_file: str
    cert_file: str
    key_file: str


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """One member: its entry in `members`, its listen address and its data directory."""

    own: MemberAddress
    members: tuple[MemberAddress, ...]
    directory: str
    listen_host: str
    """An address, not a name: etcd rejects names."""
    state: str = "new"
    tls: TlsFiles | None = None

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    @property
    def client_url(self) -> str:
        """URL for clients."""
        return self.own.client_url(self.scheme)

    @property
    def data_directory(self) -> str:
        return f"{self.directory}/data"

    @property
    def log_path(self) -> str:
        return f"{self.directory}/etcd.log"


def arguments(plan: MemberPlan) -> list[str]:
    """All arguments after the program's name."""
    own, scheme = plan.own, plan.scheme
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
        "initial-cluster-state": plan.state,
        "initial-cluster-token": _token(plan.members),
        "pre-vote": "true",  # a member that was disconnected does not depose the leader when it returns
        "auto-compaction-mode": "revision",
        "auto-compaction-retention": str(REVISIONS_KEPT),
        "quota-backend-bytes": str(DATABASE_BYTES_MAX),
        "snapshot-count": str(SNAPSHOT_AFTER),
        "logger": "zap",
        "log-outputs": "stderr",
        "log-level": "warn",
    }
    if plan.tls is not None:
        given |= _tls_arguments(plan.tls)
    return [f"--{name}={value}" for name, value in given.items()]


def _token(members: Sequence[MemberAddress]) -> str:
    """Equal for equal members, different otherwise: a member never joins an etcd to which it does not belong."""
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
