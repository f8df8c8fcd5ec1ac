"""Conversion of a broker's settings into the configuration of the etcd client and of its own etcd member.

It reads the password and certificate files, and resolves host names.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TYPE_CHECKING

from mansio.config.cluster import parse_members
from mansio.errors import ConfigError
from mansio.metadata.etcd.config import EtcdConfig
from mansio.node.etcd_member.command import MemberPlan, TlsFiles
from mansio.node.etcd_member.executable import find_program
from mansio.node.etcd_member.member import EtcdMember

if TYPE_CHECKING:
    from mansio.config.settings import Settings


def etcd_config(settings: Settings) -> EtcdConfig:
    """Return the configuration of the etcd client; reads the password and certificate files. Raises `ConfigError`."""
    return EtcdConfig.create(
        settings.etcd_urls,
        user=settings.etcd_user or None,
        password=_first_line(settings.etcd_password_file) if settings.etcd_password_file else None,
        ca_file=settings.etcd_ca_file or None,
        certificate_file=settings.etcd_cert_file or None,
        key_file=settings.etcd_key_file or None,
    )


async def create_own_member(settings: Settings) -> EtcdMember:
    """Create the etcd member of this broker from the setting `etcd_join`; it is not started. Raises `ConfigError`."""
    own = settings.own_etcd_member()
    plan = MemberPlan(
        own_address=own,
        members=parse_members(settings.etcd_join),
        directory=f"{settings.data_dir}/etcd",
        listen_host=await _address_of(settings.etcd_listen_host or own.host),
        initial_cluster_state=settings.etcd_initial_cluster_state,
        tls=_tls_files(settings),
    )
    program = await asyncio.to_thread(find_program, settings.etcd_binary)
    return EtcdMember(plan, program)


def _tls_files(settings: Settings) -> TlsFiles | None:
    if not settings.etcd_cert_file:
        return None
    return TlsFiles(settings.etcd_ca_file, settings.etcd_cert_file, settings.etcd_key_file)


async def _address_of(host: str) -> str:
    """Return the IP address of `host`, because etcd rejects names as listen addresses. Raises `ConfigError`."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"etcd_join: {host} is unknown to this machine: {error.strerror}") from error
    return str(found[0][4][0])


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"etcd_password_file: cannot read {path}: {reason}") from error
