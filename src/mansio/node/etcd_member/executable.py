"""etcd executable: finds the program and checks its version.

Invariant: a program whose version cannot be read, or is known to lose data, is never started as etcd.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from mansio import version
from mansio.errors import ConfigError
from mansio.logs import fields
from mansio.metadata.etcd import versions

logger = logging.getLogger(__name__)

VERSION_COMMAND_S_MAX: Final = 20.0
_RECOMMENDED_VERSION: Final = ".".join(map(str, versions.OLDEST_RECOMMENDED))


class EtcdProgram(NamedTuple):
    """An etcd executable whose version is supported."""

    path: str
    version: str


def find_program(setting: str = "") -> EtcdProgram:
    """Find etcd: the program `setting`, otherwise the one in PATH, otherwise the one that `make setup` unpacked.

    Raises `ConfigError` if there is none or its version is not supported. An old version is logged as a warning.
    """
    path = _path(setting)
    text = _version_of(path)
    support = versions.version_support(text)
    if support is versions.VersionSupport.REFUSED:
        raise ConfigError(
            f"etcd_binary: {path} is etcd {text}, too old or known to lose data in a crash; use "
            f"{_RECOMMENDED_VERSION} or newer"
        )
    if support is versions.VersionSupport.OLD:
        logger.warning(
            "etcd_version_old", extra=fields(version=text, recommended=_RECOMMENDED_VERSION, binary=path)
        )
    return EtcdProgram(path, text)


def _path(setting: str) -> str:
    if setting:
        found = shutil.which(setting)
        if found is None:
            raise ConfigError(f"etcd_binary: {setting} is not a program")
        return os.path.abspath(found)
    unpacked = Path(version.__file__).resolve().parents[2] / ".tools" / "bin" / "etcd"
    for candidate in ("etcd", str(unpacked)):
        found = shutil.which(candidate)
        if found is not None:
            return os.path.abspath(found)
    raise ConfigError(
        "etcd_binary: there is no etcd in PATH: install it (Debian: apt install etcd-server, macOS: brew install"
        " etcd, others: unpack a release from https://github.com/etcd-io/etcd/releases into PATH), or set etcd_binary"
        " to the path of the program"
    )


def _version_of(path: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603  # the program the operator named
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=VERSION_COMMAND_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"etcd_binary: {path} did not report its version within {VERSION_COMMAND_S_MAX:g} s"
        ) from None
    except OSError as error:
        raise ConfigError(f"etcd_binary: {path}: {error.strerror or error}") from error
    found = re.search(rb"etcd Version: (\S+)", done.stdout)
    if done.returncode or found is None:
        output = done.stdout.decode(errors="replace").strip().splitlines()
        raise ConfigError(
            f"etcd_binary: {path} is not etcd: its output is {output[-1] if output else 'nothing'!r}"
        )
    return found[1].decode(errors="replace")
