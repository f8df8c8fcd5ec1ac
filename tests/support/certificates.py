"""Certificate authorities and certificates for tests, made by the command `openssl`. Keys are ECDSA P-256."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OPENSSL_S_MAX = 60
LOOPBACK = ("localhost", "127.0.0.1", "::1")
VALID_DAYS = 30
_CONFIGURATION = """
[ca]
default_ca = here
[here]
database = {directory}/index.txt
serial = {directory}/serial
new_certs_dir = {directory}
default_md = sha256
policy = any
unique_subject = no
copy_extensions = copy
[any]
commonName = supplied
"""


class CertificateFiles(NamedTuple):
    """A certificate and its key, both PEM."""

    certificate: str
    key: str


class CertificateAuthority:
    """An authority with its files in a directory of its own."""

    def __init__(self, directory: Path, name: str = "test authority") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl command")
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.certificate = str(directory / "ca.pem")
        self._key = str(directory / "ca.key")
        self._issued = 0
        _run(
            *_new_key(self._key),
            "-x509",
            "-out",
            self.certificate,
            "-days",
            str(VALID_DAYS),
            "-subj",
            f"/CN={name}",
        )
        (directory / "index.txt").touch()
        (directory / "serial").write_text("1000\n")
        (directory / "ca.cnf").write_text(_CONFIGURATION.format(directory=directory))

    def issue(
        self, common_name: str = "localhost", names: Sequence[str] = LOOPBACK, *, is_expired: bool = False
    ) -> CertificateFiles:
        """Make a certificate for a server or client with these DNS names and addresses."""
        self._issued += 1
        start = self._directory / f"{self._issued}-{common_name}"
        files = CertificateFiles(f"{start}.pem", f"{start}.key")
        arguments = [*_new_key(files.key), "-out", f"{start}.csr", "-subj", f"/CN={common_name}"]
        if names:
            listed = ",".join(f"{'IP' if _is_address(name) else 'DNS'}:{name}" for name in names)
            arguments += ["-addext", f"subjectAltName={listed}"]
        _run(*arguments)
        validity = (
            ("-startdate", "20200101000000Z", "-enddate", "20200102000000Z")
            if is_expired
            else ("-days", str(VALID_DAYS))
        )
        _run(
            *("ca", "-batch", "-notext", "-config", str(self._directory / "ca.cnf")),
            *(
                "-cert",
                self.certificate,
                "-keyfile",
                self._key,
                "-in",
                f"{start}.csr",
                "-out",
                files.certificate,
            ),
            *validity,
        )
        return files


def _new_key(path: str) -> tuple[str, ...]:
    return ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path)


def _is_address(name: str) -> bool:
    return ":" in name or name.replace(".", "").isdigit()


def _run(*arguments: str) -> None:
    done = subprocess.run(
        ["openssl", *arguments], capture_output=True, text=True, timeout=OPENSSL_S_MAX, check=False
    )
    assert done.returncode == 0, f"openssl {arguments}: {done.stderr}"
