"""Authentication of the other brokers of a cluster, and authorization of requests that only brokers may send.

A broker that opens a connection proves in a handshake that it knows the cluster secret
(`mansio.state.broker_handshake`). The connection then has a broker identity, which never changes. A request that only
brokers may send is accepted if it names exactly the identity of its connection, and if that identity is the registered
session of the broker. A single node has no cluster secret and refuses all such requests.

Invariants:
* The proof is verified before the epoch is compared with the registered one, so that only brokers learn whether an
  epoch is registered.
* The identity of the connection, the identity in the request and the registered session must be equal. A newer epoch is
  refused like an older one: either it is forged, or this broker does not know it yet, and the sender retries.

Model: CLUSTER_ACTION of Kafka's authorizer, with the identity of a connection instead of a principal.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from mansio.broker.routing.caller import BROKER_SESSION
from mansio.errors import ClusterAuthorizationFailed, StaleBrokerEpoch
from mansio.logs import fields
from mansio.state.broker_handshake import NONCE_BYTES, BrokerIdentity, Handshake

if TYPE_CHECKING:
    from mansio.broker.routing.caller import ClientSession
    from mansio.ports import Random
    from mansio.state.broker_handshake import ClusterSecret

logger = logging.getLogger(__name__)

# Reasons for which a handshake fails, as label values of a metric and in the log.
REASON_NOT_IN_CLUSTER: Final = "unclustered"
REASON_OUT_OF_ORDER: Final = "order"
REASON_WRONG_PROOF: Final = "proof"
REASON_OTHER_EPOCH: Final = "epoch"


class ClusterRegistry(Protocol):
    """The parts of the metadata image that authentication needs."""

    cluster_id: str

    @property
    def cluster_secret(self) -> ClusterSecret | None: ...

    def epoch_of(self, node_id: int) -> int:
        """Return the epoch of a broker's session; 0 if the broker has no session."""


class BrokerChallenge(NamedTuple):
    """A handshake that has begun: nonces of the connecting broker (dialler) and of this broker (listener), and the
    SHA-256 of the certificate that the connection has of this broker (empty without TLS)."""

    dialler_nonce: bytes
    listener_nonce: bytes
    certificate_sha256: bytes = b""


class BrokerAuthenticator:
    """Authenticates connections of other brokers and authorizes their requests. One instance per broker; all methods
    run on the broker's event loop."""

    __slots__ = (
        "_node_id",
        "_random",
        "_registry",
        "authenticated_count",
        "failure_counts",
        "refused_request_count",
    )

    def __init__(self, node_id: int, registry: ClusterRegistry | None, random: Random) -> None:
        """`registry`: None on a single node."""
        self._node_id = node_id
        self._registry = registry
        self._random = random
        self.authenticated_count = 0
        """Number of connections on which another broker has authenticated."""
        self.failure_counts = dict.fromkeys(
            (REASON_NOT_IN_CLUSTER, REASON_OUT_OF_ORDER, REASON_WRONG_PROOF, REASON_OTHER_EPOCH), 0
        )
        """Number of failed handshakes by reason."""
        self.refused_request_count = 0
        """Number of refused requests: only brokers may send them, and the sender was not the broker that they named."""

    def begin_handshake(
        self,
        dialler_nonce: bytes,
        peer: BrokerIdentity | None,
        host: str,
        certificate_sha256: bytes = b"",
    ) -> BrokerChallenge:
        """Begin a handshake; return the nonces, with one chosen by this broker. `peer`: identity of the connection,
        None before a handshake; `host`: address of the peer, for the log; `certificate_sha256`: of the certificate with
        which this broker has begun the connection, empty without TLS. Raises `ClusterAuthorizationFailed`."""
        self._cluster_secret(host)
        if peer is not None:
            raise self._authentication_error(
                REASON_OUT_OF_ORDER, host, "the connection already has an identity"
            )
        if len(dialler_nonce) != NONCE_BYTES:
            raise self._authentication_error(
                REASON_OUT_OF_ORDER, host, f"a nonce of {len(dialler_nonce)} bytes"
            )
        return BrokerChallenge(dialler_nonce, self._random.bytes(NONCE_BYTES), certificate_sha256)

    def authenticate(
        self, challenge: BrokerChallenge | None, claimed: BrokerIdentity, proof: bytes, host: str
    ) -> bytes:
        """Verify the proof of the connecting broker and return the proof of this broker. The caller must not use
        `challenge` again, whatever the result.

        Raises `ClusterAuthorizationFailed`, and `StaleBrokerEpoch` if the epoch in `claimed` is not the registered one.
        """
        secret, registry = self._cluster_secret(host), self._registry
        assert registry is not None, "a cluster secret comes from the registry"
        if challenge is None:
            raise self._authentication_error(REASON_OUT_OF_ORDER, host, "there is no challenge")
        handshake = Handshake(registry.cluster_id, claimed, self._node_id, *challenge)
        if not handshake.is_dialler_proof(secret, proof) or claimed.node_id == self._node_id:
            detail = "the proof is not valid"
            if challenge.certificate_sha256:
                detail += " here (it is for another certificate if something between the brokers ends TLS)"
            raise self._authentication_error(REASON_WRONG_PROOF, host, detail)
        registered = registry.epoch_of(claimed.node_id)
        if registered == 0 or claimed.broker_epoch != registered:
            self.failure_counts[REASON_OTHER_EPOCH] += 1
            raise StaleBrokerEpoch(
                f"broker {claimed.node_id} is not registered in epoch {claimed.broker_epoch}"
            )
        self.authenticated_count += 1
        return handshake.listener_proof(secret)

    def require_identity(
        self, peer: BrokerIdentity | None, node_id: int, broker_epoch: int, host: str
    ) -> BrokerIdentity:
        """Return `peer`, the identity of the connection, if it equals `node_id` and `broker_epoch` and is a registered
        session.

        Raises `ClusterAuthorizationFailed`, and `StaleBrokerEpoch` if the broker has another session now.
        """
        if peer is None or peer.node_id != node_id or peer.broker_epoch != broker_epoch:
            raise self.count_refused_request(peer, node_id, host)
        if not self.is_current_session(peer):
            raise StaleBrokerEpoch(f"broker {node_id} has another session than epoch {broker_epoch}")
        return peer

    def count_refused_request(
        self, peer: BrokerIdentity | None, node_id: int, host: str
    ) -> ClusterAuthorizationFailed:
        """Count and log a request whose sender is not the broker that the request names; return the error for the
        response."""
        self.refused_request_count += 1
        known = fields(peer=host, broker=node_id, authenticated=None if peer is None else peer.node_id)
        logger.warning("inter_broker_request_refused", extra=known)
        return ClusterAuthorizationFailed("only brokers that have authenticated may send this request")

    def session_of(self, session: ClientSession, peer: BrokerIdentity | None) -> ClientSession:
        """Return the session with which a request runs: `session`, that of its client, or the one of brokers if it
        comes from a registered session of a broker."""
        return session if peer is None or not self.is_current_session(peer) else BROKER_SESSION

    def is_current_session(self, identity: BrokerIdentity) -> bool:
        """Return whether `identity` is the registered session of a broker."""
        registry = self._registry
        return registry is not None and 0 < registry.epoch_of(identity.node_id) == identity.broker_epoch

    def _cluster_secret(self, host: str) -> ClusterSecret:
        secret = None if self._registry is None else self._registry.cluster_secret
        if secret is None:
            raise self._authentication_error(REASON_NOT_IN_CLUSTER, host, "this broker is not in a cluster")
        return secret

    def _authentication_error(self, reason: str, host: str, detail: str) -> ClusterAuthorizationFailed:
        self.failure_counts[reason] += 1
        logger.warning("broker_handshake_failed", extra=fields(peer=host, reason=reason, detail=detail))
        return ClusterAuthorizationFailed(detail)
