"""Protection of a dev-cluster (`--secure`): its files, its first user, and what a client on this machine connects with.

Invariants:
* The files exist before a process starts. The first user exists before a broker listens, and brokers that start at the
  same time do not create it twice.
* Members of etcd and brokers have certificates of one authority, each one of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.cli.broker.dev_cluster.plan import broker_certificate, member_certificate
from mansio.config.sources import load_settings
from mansio.node.protected_start import LOCAL_NAMES, ClientFiles, ProtectedStart, names_of

if TYPE_CHECKING:
    from mansio.cli.broker.dev_cluster.plan import ClusterPlan


class ClusterProtection:
    """The protected start of one plan. Methods are called in the order of their definitions."""

    def __init__(self, plan: ClusterPlan) -> None:
        """Raise `ConfigError` for settings, of the environment too, that brokers would refuse."""
        self._bootstrap_servers = plan.bootstrap_servers
        local = frozenset(LOCAL_NAMES)
        certificates = {member_certificate(number): local for number, _ in enumerate(plan.members, 1)}
        for broker in plan.brokers:
            settings = load_settings(None, plan.values(broker))
            certificates[broker_certificate(broker.node_id)] = names_of(settings)
        self._settings = settings
        self._start = ProtectedStart(plan.security_directory, certificates, settings.sasl_mechanisms)

    @property
    def new_password(self) -> str | None:
        """Password of the first user, if this start has created it."""
        return self._start.new_password

    def prepare_files(self) -> None:
        """Make what is missing, and renew certificates. Raises `ConfigError`, `MissingExtra`."""
        self._start.prepare_files()

    async def create_first_user(self) -> ClientFiles:
        """Create the first user if etcd, which runs, has none; return the paths for clients. Raises `MansioError`,
        `OSError`."""
        from mansio.node.cluster_users import open_cluster_users  # needs gRPC, as brokers of a cluster do

        async with open_cluster_users(self._settings) as users:
            await self._start.create_first_user(users)
        return self._start.write_client_files(self._bootstrap_servers)
