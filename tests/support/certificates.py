"""Certificate authorities and certificates for tests, made by the `openssl` command. Keys are P-256, which is fast."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OPENSSL: Final = shutil.which("openssl")

SERVER_NAMES: Final = ("DNS:localhost", "IP:127.0.0.1", "IP:::1")


class Certificate(NamedTuple):
    """Paths of a certificate, with its chain, and of its key."""

    certificate: Path
    key: Path


def _openssl(*arguments: str | Path, directory: Path, stdin: str = "") -> None:
    if OPENSSL is None:
        pytest.skip("the openssl command is not installed")
    done = subprocess.run(
        [OPENSSL, *map(str, arguments)],
        cwd=directory,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class Authority:
    """A certificate authority in a directory of its own. `issuer`: the authority above it; None for a root."""

    def __init__(
        self,
        directory: Path,
        name: str = "Test CA",
        *,
        issuer: Authority | None = None,
        expired: bool = False,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._issuer = issuer
        self._issued = 0
        self.certificate = directory / "ca.pem"
        """The certificate of this authority, which its users trust."""
        self._key = directory / "ca.key"
        extensions = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")
        _sign(
            directory,
            self.certificate,
            self._key,
            subject=f"/CN={name}",
            extensions=extensions,
            issuer=issuer,
            days=-1 if expired else 30,
        )

    def issue(
        self,
        subject: str = "localhost",
        *,
        names: Sequence[str] = SERVER_NAMES,
        days: int = 30,
        purposes: Sequence[str] = ("serverAuth", "clientAuth"),
        with_chain: bool = True,
    ) -> Certificate:
        """Issue a certificate. `subject`: a common name, or a whole subject as openssl takes it (`/O=x/CN=y`). `names`:
        alternative names; none for a client. `days`: validity from now; negative for one that has expired.
        `with_chain`: whether the file also has the authorities below the root."""
        self._issued += 1
        path = self.directory / f"{self._issued}.pem"
        key = self.directory / f"{self._issued}.key"
        extensions = [f"extendedKeyUsage={','.join(purposes)}"] if purposes else []
        if names:
            extensions.append(f"subjectAltName={','.join(names)}")
        whole = subject if subject.startswith("/") else f"/CN={subject}"
        _sign(self.directory, path, key, subject=whole, extensions=extensions, issuer=self, days=days)
        if with_chain:
            above: Authority | None = self
            while above is not None and above._issuer is not None:
                with path.open("a") as file:
                    file.write(above.certificate.read_text())
                above = above._issuer
        return Certificate(path, key)

    def revocation_list(self, *revoked: Certificate, dates: tuple[str, str] | None = None) -> str:
        """Return a revocation list of this authority as PEM, valid for 30 days. `dates`: when it was made and when the
        next one is due, as `YYYYMMDDHHMMSSZ`."""
        path = self.directory / "crl.pem"
        numbers = [_serial_number(each.certificate) for each in revoked]
        entries = [f"R\t401231235959Z\t250101000000Z\t{number}\tunknown\t/CN=revoked" for number in numbers]
        (self.directory / "index.txt").write_text("".join(f"{entry}\n" for entry in entries))
        (self.directory / "index.txt.attr").write_text("unique_subject = no\n")
        settings = self.directory / "crl.cnf"
        settings.write_text("[ca]\ndefault_ca=own\n[own]\ndatabase=index.txt\ndefault_md=sha256\n")
        validity = ["-crldays", "30"]
        if dates is not None:
            validity = ["-crl_lastupdate", dates[0], "-crl_nextupdate", dates[1]]
        _openssl(
            "ca", "-config", settings, "-gencrl", "-keyfile", self._key, "-cert", self.certificate, "-out", path,
            *validity, directory=self.directory,
        )  # fmt: skip
        return path.read_text()


def _serial_number(certificate: Path) -> str:
    assert OPENSSL is not None
    command = [OPENSSL, "x509", "-in", str(certificate), "-noout", "-serial"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return output.strip().partition("=")[2]


def _sign(
    directory: Path,
    path: Path,
    key: Path,
    *,
    subject: str,
    extensions: Sequence[str],
    issuer: Authority | None,
    days: int,
) -> None:
    """Create a key and its certificate, signed by `issuer`, or by itself."""
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key)
    if issuer is None and days > 0:
        added = [part for extension in extensions for part in ("-addext", extension)]
        _openssl(
            "req",
            "-x509",
            *new_key,
            "-out",
            path,
            "-subj",
            subject,
            "-days",
            str(days),
            *added,
            directory=directory,
        )
    else:
        request, settings = path.with_suffix(".csr"), path.with_suffix(".ext")
        settings.write_text("\n".join(extensions) + "\n")
        _openssl("req", *new_key, "-out", request, "-subj", subject, directory=directory)
        signer = (
            ("-signkey", key)
            if issuer is None
            else ("-CA", issuer.certificate, "-CAkey", issuer._key, "-CAcreateserial")
        )
        _openssl(
            "x509", "-req", "-in", request, *signer, "-out", path, "-days", str(days), "-extfile", settings,
            directory=directory,
        )  # fmt: skip
    key.chmod(0o600)


def encrypted_key(key: Path, path: Path, passphrase: str = "secret") -> Path:
    """Write a copy of a key that is encrypted with a passphrase to `path`."""
    _openssl(
        "ec", "-in", key, "-aes256", "-passout", f"pass:{passphrase}", "-out", path, directory=path.parent
    )
    return path
