"""How the connections of one listener of the Kafka protocol are encrypted, and how their clients authenticate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.routing.caller import ClientSession
from mansio.state.authentication.certificate_names import user_of_certificate

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from mansio.api.kafka.server.sasl_gate import SaslSettings
    from mansio.state.authentication.certificate_names import MappingRules
    from mansio.state.authentication.revocation import RevocationLists


class ListenerSecurity(NamedTuple):
    """Security of one listener. `context`: returns the TLS context for a new connection; None without TLS. `sasl`: None
    if clients do not log in. `mapping`: makes users of the certificates of clients; None if those are not their
    identity, as where clients log in. `certificate_sha256`: returns the digest of the certificate in the context of a
    connection, which other brokers sign; without it no broker can authenticate on a connection with TLS. `revocations`:
    returns the revocation lists that are in use."""

    context: Callable[[], ssl.SSLContext] | None = None
    sasl: SaslSettings | None = None
    mapping: MappingRules | None = None
    certificate_sha256: Callable[[ssl.SSLContext], bytes] | None = None
    revocations: Callable[[], RevocationLists | None] = lambda: None

    def session_of_certificate(
        self, certificate: bytes | None, expires_ms: int | None, listener: str
    ) -> ClientSession | None:
        """Return the session of a client with this certificate (DER), which has been verified and expires at
        `expires_ms` (Unix time); None if it is not the client's identity, or if there is none. Raises
        `InvalidSubject`."""
        if self.mapping is None or certificate is None:
            return None
        return ClientSession(user_of_certificate(certificate, self.mapping), listener, expires_ms)


OPEN: Final = ListenerSecurity()
"""Neither TLS nor authentication."""
