"""Protected start: certificate authority, certificates, secrets key and first user, made at the first start in one
directory and used again at the next ones. Of a broker (`mansio serve --secure`), or of the brokers and etcd members of
a cluster (`mansio dev-cluster --secure`).

Invariants:
* The directory has mode 0700, its files 0600; each file is replaced as a whole.
* The first user exists before a listener accepts a connection. It is created while there is no user, so one that was
  deleted does not come back beside others.
* The password is in its file, and nowhere in a log line or an error.

Model: the security auto-configuration of Elasticsearch 8.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mansio.config.protected_start import (
    CA_FILE,
    CERTIFICATE_FILE,
    FIRST_USER,
    SECRETS_KEY_FILE,
    SECURITY_DIRECTORY,
)
from mansio.config.security import PLAIN, SASL_MECHANISMS
from mansio.errors import ConfigError
from mansio.host.private_file import make_private_directory, write_private_file
from mansio.logs import fields
from mansio.net.tls.certificate_authority import CertificateAuthority, utc_now
from mansio.state.authentication.secrets_keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from mansio.broker.services.users import UserService
    from mansio.config.settings import Settings

logger = logging.getLogger(__name__)

AUTHORITY_FILE: Final = "authority.pem"
PASSWORD_FILE: Final = "admin.password"  # noqa: S105  # a name
KCAT_FILE: Final = "kcat.conf"
LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")
_PASSWORD_LENGTH: Final = 24
_PASSWORD_CHARACTERS: Final = string.ascii_letters + string.digits
_FILE_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ClientFiles:
    """What a client on this machine needs to connect; absolute paths. `password` and `kcat`: None if the file with the
    password of the first user was removed."""

    ca: str
    user: str
    mechanism: str
    password: str | None
    kcat: str | None

    def connect_arguments(self) -> dict[str, Any] | None:
        """Return the arguments with which `mansio.connect` logs in as the first user; None without its password. Reads
        the file. Raises `OSError`."""
        if self.password is None:
            return None
        with open(self.password, encoding="utf-8") as file:
            password = file.readline().rstrip("\n")
        return {"tls": self.ca, "user": self.user, "mechanism": self.mechanism, "password": password}


class ProtectedStart:
    """The files of a protected start, and its first user. All methods block for some milliseconds."""

    def __init__(
        self,
        directory: str,
        certificates: Mapping[str, Iterable[str]],
        mechanisms: Sequence[str],
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """`directory`: of all files. `certificates`: host names and addresses of each certificate, by its file.
        `mechanisms`: with which the first user may log in."""
        self._now = now
        self._certificates = {name: frozenset(names) for name, names in certificates.items()}
        self._mechanisms = mechanisms
        self._directory = os.path.abspath(directory)
        self.new_password: str | None = None
        """Password of the first user, if this start has created it."""

    @classmethod
    def of_broker(cls, settings: Settings, now: Callable[[], datetime] = utc_now) -> ProtectedStart:
        """Return the protected start of a broker alone, whose files are below its data directory."""
        directory = f"{settings.data_dir}/{SECURITY_DIRECTORY}"
        return cls(directory, {CERTIFICATE_FILE: names_of(settings)}, settings.sasl_mechanisms, now)

    def prepare_files(self) -> None:
        """Make what is missing, and renew certificates that expire soon or lack a name. Raises `ConfigError`,
        `MissingExtra`."""
        try:
            make_private_directory(self._directory)
            self._prepare_certificates()
            if self._read(SECRETS_KEY_FILE) is None:
                write_private_file(self._path(SECRETS_KEY_FILE), f"{secrets.token_hex(KEY_BYTES)}\n".encode())
        except OSError as error:
            raise ConfigError(f"cannot use {error.filename or self._directory}: {error.strerror}") from error

    def renew_certificates(self) -> bool:
        """Renew what expires soon while brokers run; return whether a certificate was renewed. Without the key
        of the authority none is. Raises `ConfigError`."""
        try:
            pem = self._read(AUTHORITY_FILE)
            return pem is not None and self._issue_certificates(self._load_authority(pem), self._now())
        except OSError as error:
            raise ConfigError(f"cannot use {error.filename or self._directory}: {error.strerror}") from error

    async def create_first_user(self, users: UserService) -> None:
        """Create the first user with a random password, unless there are users. Raises `ConfigError`,
        `StorageError`."""
        if users.user_count:
            return
        path = self._path(PASSWORD_FILE)
        content = self._read(PASSWORD_FILE)
        if content is None:
            password = "".join(secrets.choice(_PASSWORD_CHARACTERS) for _ in range(_PASSWORD_LENGTH))
            write_private_file(path, f"{password}\n".encode())
        else:  # of a start that ended before it had created the user
            password = content.partition(b"\n")[0].decode("utf-8", "replace")
            if not password:
                raise ConfigError(f"{path} contains no password; remove it")
        await users.create(FIRST_USER, password)
        self.new_password = password

    def write_client_files(self, addresses: str) -> ClientFiles:
        """Write the settings of kcat for brokers at `addresses`, and return the paths for clients. Raises `OSError`."""
        ca, password, kcat = (self._path(name) for name in (CA_FILE, PASSWORD_FILE, KCAT_FILE))
        mechanism = next((name for name in SASL_MECHANISMS if name in self._mechanisms), SASL_MECHANISMS[0])
        content = self._read(PASSWORD_FILE)
        if content is None:
            with contextlib.suppress(FileNotFoundError):
                os.remove(kcat)
            return ClientFiles(ca, FIRST_USER, mechanism, None, None)
        settings = {
            "bootstrap.servers": addresses,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": ca,
            # Distributions have kcat with librdkafka before 2.6.1, whose nonces of SCRAM are wrong. TLS encrypts PLAIN.
            "sasl.mechanism": PLAIN if PLAIN in self._mechanisms else mechanism,
            "sasl.username": FIRST_USER,
            "sasl.password": content.partition(b"\n")[0].decode("utf-8", "replace"),
        }
        lines = "".join(f"{name}={value}\n" for name, value in settings.items())
        write_private_file(kcat, lines.encode())
        return ClientFiles(ca, FIRST_USER, mechanism, password, kcat)

    def _prepare_certificates(self) -> None:
        now = self._now()
        authority = self._authority(now)
        if authority is not None:
            self._issue_certificates(authority, now)

    def _issue_certificates(self, authority: CertificateAuthority, now: datetime) -> bool:
        trusted = self._read(CA_FILE)
        if trusted is None or authority.certificate.strip() not in trusted:
            write_private_file(self._path(CA_FILE), authority.certificate)
        is_renewed = False
        for file, names in self._certificates.items():
            path, present = self._path(file), self._read(file)
            reason = "there is none" if present is None else authority.renewal_reason(present, names, now)
            if reason:
                write_private_file(path, authority.issue(names, now))
                logger.info("certificate_issued", extra=fields(file=path, reason=reason))
                is_renewed = True
        return is_renewed

    def _authority(self, now: datetime) -> CertificateAuthority | None:
        """Return the authority, a new one at the first start. None if its key is kept elsewhere: then its certificates
        are renewed elsewhere, too. Raises `ConfigError`."""
        path, pem = self._path(AUTHORITY_FILE), self._read(AUTHORITY_FILE)
        if pem is not None:
            return self._load_authority(pem)
        if self._read(CA_FILE) is None:
            authority = CertificateAuthority.create(now)
            write_private_file(path, authority.pem)
            logger.info("certificate_authority_created", extra=fields(file=path))
            return authority
        if any(self._read(file) is None for file in self._certificates):
            raise ConfigError(
                f"{path} is missing: restore it, or remove {self._path(CA_FILE)} too for a new authority"
            )
        return None

    def _load_authority(self, pem: bytes) -> CertificateAuthority:
        try:
            return CertificateAuthority(pem)
        except ConfigError as error:
            raise ConfigError(f"cannot use {self._path(AUTHORITY_FILE)}: {error.message}") from None

    def _path(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def _read(self, name: str) -> bytes | None:
        try:
            with open(self._path(name), "rb") as file:
                return file.read(_FILE_BYTES_MAX)
        except FileNotFoundError:
            return None


def names_of(settings: Settings) -> frozenset[str]:
    """Return the names and addresses by which clients reach a broker."""
    names = {*LOCAL_NAMES, *settings.http_names}
    addresses = [
        address for each in settings.kafka_listeners.all for address in (each.address, each.advertised)
    ]
    addresses += [
        settings.http_address,
        settings.registry_address,
        settings.grpc_address,
        settings.sqs_address,
    ]
    names |= {each.host.lower() for each in addresses if each is not None and not each.is_wildcard}
    if (host := socket.gethostname().lower()).isascii():
        names.add(host)
    return frozenset(filter(None, names))
