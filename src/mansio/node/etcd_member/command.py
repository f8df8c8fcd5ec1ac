"""The command line of a member of etcd. Pure: a plan in, arguments out.

Always true: a member listens on the one address its entry in `etcd_join` names, which is loopback unless the operator
named another; all members are told the same list in the same order; history is compacted, so the database does not
grow with every change.
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
"""What a broker that was away may still catch up on by watching; older changes it lists anew."""

DATABASE_BYTES_MAX: Final = 2 << 30
SNAPSHOT_AFTER: Final = 10_000
"""Raft entries between snapshots: the write-ahead log that a start reads stays small."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificates of a member, PEM. The same one is shown to clients and to the other members."""

    ca_file: str
    cert_file: str
    key_file: str


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """One member: which of `members` it is, where it listens and where its data are."""

    own: MemberAddress
    members: tuple[MemberAddress, ...]
    directory: str
    listen_host: str
    """An address, not a name: etcd refuses names."""
    state: str = "new"
    tls: TlsFiles | None = None

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    @property
    def client_url(self) -> str:
        """Where clients find it."""
        return self.own.client_url(self.scheme)

    @property
    def data_directory(self) -> str:
        return f"{self.directory}/data"

    @property
    def log_path(self) -> str:
        return f"{self.directory}/etcd.log"


def arguments(plan: MemberPlan) -> list[str]:
    """Everything behind the program's name."""
    own, scheme = plan.own, plan.scheme
    listen = f"{scheme}://{url_host(plan.listen_host)}"
    everybody = ",".join(f"{member.name}={member.peer_url(scheme)}" for member in plan.members)
    given = {
        "name": own.name,
        "data-dir": plan.data_directory,
        "listen-peer-urls": f"{listen}:{own.peer_port}",
        "listen-client-urls": f"{listen}:{own.client_port}",
        "initial-advertise-peer-urls": own.peer_url(scheme),
        "advertise-client-urls": plan.client_url,
        "initial-cluster": everybody,
        "initial-cluster-state": plan.state,
        "initial-cluster-token": _token(plan.members),
        "pre-vote": "true",  # a member that was cut off does not unseat the leader when it comes back
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
    """The same for the same members, another one for others: a member never meets an etcd it does not belong to."""
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
