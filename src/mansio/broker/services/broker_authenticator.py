"""Authentication of the other brokers of a cluster, and authorization of what only they may request.

A broker that connects proves that it knows the cluster's secret (`state.broker_handshake`); its connection then has an
identity, which never changes. A request that only brokers may send is accepted on a connection with exactly the
identity that the request names, as long as that is the broker's registered session. A single node has no secret and
accepts none.

Invariants:
* The proof is verified before anything that it proves: only brokers learn whether an epoch is registered.
* Identity, request and registration have to be equal. A newer epoch is refused like an older one: it is forged, or this
  broker does not know it yet, and the sender retries.

Model: CLUSTER_ACTION of Kafka's authorizer, with the identity of a connection instead of a principal.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

from mansio.errors import ClusterAuthorizationFailed, StaleBrokerEpoch
from mansio.logs import fields
from mansio.state.broker_handshake import NONCE_BYTES, BrokerIdentity, Handshake

if TYPE_CHECKING:
    from mansio.ports import Random
    from mansio.state.broker_handshake import ClusterSecret

logger = logging.getLogger(__name__)

NOT_IN_CLUSTER: Final = "unclustered"
OUT_OF_ORDER: Final = "order"
WRONG_PROOF: Final = "proof"
OTHER_EPOCH: Final = "epoch"


class ClusterRegistry(Protocol):
    """What the metadata image knows of the cluster."""

    cluster_id: str

    @property
    def cluster_secret(self) -> ClusterSecret | None: ...

    def epoch_of(self, node_id: int) -> int:
        """The epoch of a broker's session; 0 without a session."""


class BrokerChallenge:
    """The nonces of a connection whose dialler has not proved itself yet."""

    __slots__ = ("dialler_nonce", "listener_nonce")

    def __init__(self, dialler_nonce: bytes, listener_nonce: bytes) -> None:
        self.dialler_nonce = dialler_nonce
        self.listener_nonce = listener_nonce


class BrokerAuthenticator:
    """One per broker. All methods run on the broker's event loop."""

    __slots__ = ("_node_id", "_random", "_registry", "authenticated", "failures", "refused_requests")

    def __init__(self, node_id: int, registry: ClusterRegistry | None, random: Random) -> None:
        """`registry`: None on a single node."""
        self._node_id = node_id
        self._registry = registry
        self._random = random
        self.authenticated = 0
        """Connections on which another broker has authenticated."""
        self.failures = dict.fromkeys((NOT_IN_CLUSTER, OUT_OF_ORDER, WRONG_PROOF, OTHER_EPOCH), 0)
        """Failed handshakes by reason."""
        self.refused_requests = 0
        """Requests that only brokers may send, from others."""

    def challenge(self, dialler_nonce: bytes, peer: BrokerIdentity | None, host: str) -> BrokerChallenge:
        """Begin a handshake on a connection; it has one. Raises `ClusterAuthorizationFailed`."""
        self._secret(host)
        if peer is not None:
            raise self._failed(OUT_OF_ORDER, host, "the connection has an identity already")
        if len(dialler_nonce) != NONCE_BYTES:
            raise self._failed(OUT_OF_ORDER, host, f"a nonce of {len(dialler_nonce)} bytes")
        return BrokerChallenge(dialler_nonce, self._random.bytes(NONCE_BYTES))

    def authenticate(
        self, challenge: BrokerChallenge | None, claimed: BrokerIdentity, proof: bytes, host: str
    ) -> bytes:
        """Verify the dialler's proof; returns the listener's. The challenge may not be used again, whatever the result.

        Raises `ClusterAuthorizationFailed`, and `StaleBrokerEpoch` for a broker whose epoch is not the registered one.
        """
        secret, registry = self._secret(host), self._registry
        assert registry is not None, "there is a secret"
        if challenge is None:
            raise self._failed(OUT_OF_ORDER, host, "there is no challenge")
        handshake = Handshake(
            registry.cluster_id, claimed, self._node_id, challenge.dialler_nonce, challenge.listener_nonce
        )
        if not handshake.is_dialler_proof(secret, proof) or claimed.node_id == self._node_id:
            raise self._failed(WRONG_PROOF, host, "the proof is not valid")
        registered = registry.epoch_of(claimed.node_id)
        if registered == 0 or claimed.broker_epoch != registered:
            self.failures[OTHER_EPOCH] += 1
            raise StaleBrokerEpoch(
                f"broker {claimed.node_id} is not registered in epoch {claimed.broker_epoch}"
            )
        self.authenticated += 1
        return handshake.listener_proof(secret)

    def require(
        self, peer: BrokerIdentity | None, node_id: int, broker_epoch: int, host: str
    ) -> BrokerIdentity:
        """The identity of the connection, if it is this broker in this epoch, and that is its registered session.

        Raises `ClusterAuthorizationFailed`, and `StaleBrokerEpoch` for a broker that has another session by now.
        """
        if peer is None or peer.node_id != node_id or peer.broker_epoch != broker_epoch:
            raise self.refused(peer, node_id, host)
        if not self.is_current(peer):
            raise StaleBrokerEpoch(f"broker {node_id} has another session than epoch {broker_epoch}")
        return peer

    def refused(self, peer: BrokerIdentity | None, node_id: int, host: str) -> ClusterAuthorizationFailed:
        """Count and log a request in the name of a broker that its sender is not; returns the error."""
        self.refused_requests += 1
        known = fields(peer=host, broker=node_id, authenticated=None if peer is None else peer.node_id)
        logger.warning("inter_broker_request_refused", extra=known)
        return ClusterAuthorizationFailed()

    def is_current(self, identity: BrokerIdentity) -> bool:
        """Whether this is the registered session of a broker."""
        registry = self._registry
        return registry is not None and 0 < registry.epoch_of(identity.node_id) == identity.broker_epoch

    def _secret(self, host: str) -> ClusterSecret:
        secret = None if self._registry is None else self._registry.cluster_secret
        if secret is None:
            raise self._failed(NOT_IN_CLUSTER, host, "this broker is in no cluster")
        return secret

    def _failed(self, reason: str, host: str, detail: str) -> ClusterAuthorizationFailed:
        self.failures[reason] += 1
        logger.warning("broker_handshake_failed", extra=fields(peer=host, reason=reason, detail=detail))
        return ClusterAuthorizationFailed(detail)
