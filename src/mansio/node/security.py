"""TLS and authentication of a broker's listeners, TLS of its connections to other brokers, and its secrets keys, as its
settings define them."""

from __future__ import annotations

import os
import stat
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mansio.api.kafka.server.listener_security import ListenerSecurity
from mansio.api.kafka.server.sasl_gate import SaslSettings
from mansio.config.listeners import SecurityProtocol
from mansio.config.security import has_certificate_users
from mansio.errors import ConfigError
from mansio.host.extras import require_extra
from mansio.net.tls.certificate_reloader import CertificateReloader
from mansio.net.tls.contexts import ClientAuthentication, TlsFiles, load_server_context
from mansio.state.authentication.certificate_names import MappingRules
from mansio.state.authentication.secrets_keys import SecretsKeys

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from mansio.config.listeners import Listener
    from mansio.config.settings import Settings
    from mansio.host.host_ports import HostPorts


class BrokerSecurity:
    """Security of the listeners of one broker. `certificates`: of the listeners with TLS, None if there are none.
    `secrets_keys`: None if the broker has none."""

    def __init__(self, settings: Settings, host: HostPorts) -> None:
        """Read the files of certificates and of secrets keys. Raises `ConfigError` if they cannot be used,
        `MissingExtra`."""
        self._settings = settings
        self.secrets_keys = read_secrets_keys(settings.secrets_key_file)
        self._host = host
        self.certificates: CertificateReloader | None = None
        listeners = settings.kafka_listeners.all
        if any(each.is_encrypted for each in settings.security_protocols):
            self.certificates = CertificateReloader(
                _files(settings),
                host.scheduler,
                host.file_thread,
                dials=self._dials_with_tls,
                logs_in=settings.kafka_listeners.inter_broker.security_protocol.is_authenticated,
            )
        self.listeners = {
            each.name: self._security_of(each)
            for each in listeners
            if each.security_protocol is not SecurityProtocol.PLAINTEXT
        }
        """By name, those that have TLS or authenticate their clients."""

    @property
    def has_log_ins(self) -> bool:
        """Whether clients of a listener log in."""
        return any(each.is_authenticated for each in self._settings.security_protocols)

    @property
    def dialler_context(self) -> Callable[[], ssl.SSLContext] | None:
        """Returns the TLS context for a new connection to another broker; None if brokers connect without TLS."""
        certificates = self.certificates
        if certificates is None or not self._dials_with_tls:
            return None
        return lambda: certificates.dialler_context

    @property
    def _dials_with_tls(self) -> bool:
        settings = self._settings
        return settings.clustered and settings.kafka_listeners.inter_broker.security_protocol.is_encrypted

    def start(self) -> None:
        """Begin to renew the certificates when their files change."""
        if self.certificates is not None:
            self.certificates.start()

    def reload(self) -> None:
        """Read the files of the certificates again."""
        if self.certificates is not None:
            self.certificates.reload()

    def stop(self) -> None:
        if self.certificates is not None:
            self.certificates.stop()

    def _security_of(self, listener: Listener) -> ListenerSecurity:
        settings, certificates = self._settings, self.certificates
        protocol = listener.security_protocol
        sasl = None
        if protocol.is_authenticated:
            sasl = SaslSettings(
                mechanisms=settings.sasl_mechanisms,
                new_nonce=self._host.random.bytes,
                listener=listener.name,
                session_ms_max=settings.connections_max_reauth_ms,
                failure_delay_ms=settings.connection_failed_authentication_delay_ms,
                frame_bytes_max=settings.sasl_server_max_receive_size,
                timeout_ms=settings.authentication_timeout_ms,
            )
        if certificates is None or not protocol.is_encrypted:
            return ListenerSecurity(sasl=sasl)
        mapping = None
        if has_certificate_users(protocol, settings.ssl_client_auth):
            mapping = MappingRules(settings.ssl_principal_mapping_rules)
        return ListenerSecurity(
            partial(certificates.context_for, log_ins=protocol.is_authenticated),
            sasl,
            mapping,
            certificates.certificate_sha256,
            lambda: certificates.revocations,
        )


class EarlyContext:
    """TLS context of the listeners that accept connections before the broker has started: that of `certificates` as
    soon as it returns them."""

    def __init__(
        self, settings: Settings, certificates: Callable[[], CertificateReloader | None], *, log_ins: bool
    ) -> None:
        """Read the files. `log_ins`: whether clients log in. Raises `ConfigError` if the files cannot be used."""
        loaded = load_server_context(_files(settings))
        self._first = loaded.context_for_log_ins if log_ins else loaded.context
        self._log_ins = log_ins
        self._certificates = certificates

    def __call__(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        certificates = self._certificates()
        return self._first if certificates is None else certificates.context_for(log_ins=self._log_ins)


def read_secrets_keys(path: str) -> SecretsKeys | None:
    """Return the secrets keys in a file, None without a file. Raises `ConfigError`, also if other users of the machine
    can read the file, `MissingExtra`."""
    if not path:
        return None
    require_extra("secure")
    try:
        mode = os.stat(path).st_mode
        text = Path(path).read_text("ascii")
    except OSError as error:
        raise ConfigError(f"secrets_key_file: {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        text = ""
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"secrets_key_file: others may read {path}; use chmod 600")
    try:
        return SecretsKeys.parse(text)
    except ConfigError as error:
        raise ConfigError(f"secrets_key_file: {path}: {error.message}") from None


def _files(settings: Settings) -> TlsFiles:
    return TlsFiles(
        settings.ssl_certificate_location,
        settings.ssl_key_location,
        settings.ssl_ca_location,
        ClientAuthentication(settings.ssl_client_auth),
        settings.ssl_crl_location,
    )
