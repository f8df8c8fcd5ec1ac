"""Holds and ends transactions of any coordinator, on this broker or another one, by PrepareTransaction and EndTxn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from mansio.broker.routing.routes import coordinator_node_id
from mansio.errors import CoordinatorNotAvailable, MansioError, WireError, error_for_code
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from mansio.broker.routing.routes import CoordinatorLookup
    from mansio.ports import Peers
    from mansio.state.transactions.batch_decision import TaskTransaction
    from mansio.state.transactions.transaction import Transaction

BATCH_END_CLIENT_ID: Final = "mansio-batch-commits"
PREPARE_TRANSACTION_VERSION: Final = 0
END_TXN_VERSION: Final = 5
BATCH_END_TIMEOUT_MS: Final = 5_000


class LocalTransactions(Protocol):
    """The transactions that this broker coordinates; implemented by `TransactionCoordinator`."""

    async def hold(self, transactional_id: str, producer_id: int, producer_epoch: int) -> Transaction: ...

    async def end(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        is_commit: bool,
        bumps_epoch: bool,
    ) -> Transaction: ...


class RoutedEnder:
    """Holds and ends transactions with their coordinators. All methods run on the broker's event loop."""

    def __init__(
        self,
        local: LocalTransactions,
        *,
        node_id: int,
        lookup: CoordinatorLookup | None = None,
        peers: Peers | None = None,
    ) -> None:
        """`lookup`: metadata of `__transaction_state`; it and `peers` are None on a single node."""
        self._local = local
        self._node_id = node_id
        self._lookup = lookup
        self._peers = peers

    async def hold(self, transaction: TaskTransaction) -> None:
        """Hold an ongoing transaction; does nothing for a held one. Raises the errors of the coordinator."""
        leader = coordinator_node_id(transaction.transactional_id, self._node_id, self._lookup)
        if leader == self._node_id:
            await self._local.hold(*transaction)
            return
        await self._request(
            leader, ApiKey.PREPARE_TRANSACTION, PREPARE_TRANSACTION_VERSION, transaction._asdict()
        )

    async def end(self, transaction: TaskTransaction, *, is_commit: bool) -> None:
        """Commit or abort a transaction; returns when its decision is committed. Raises the errors of the
        coordinator."""
        leader = coordinator_node_id(transaction.transactional_id, self._node_id, self._lookup)
        if leader == self._node_id:
            await self._local.end(*transaction, is_commit=is_commit, bumps_epoch=True)
            return
        asked = {**transaction._asdict(), "committed": is_commit}
        await self._request(leader, ApiKey.END_TXN, END_TXN_VERSION, asked)

    async def _request(self, node_id: int, key: ApiKey, version: int, asked: dict[str, Any]) -> None:
        assert self._peers is not None
        request = messages.encode_request(key, version, 0, BATCH_END_CLIENT_ID, asked)
        try:
            frame = await self._peers.send(node_id, request, timeout_ms=BATCH_END_TIMEOUT_MS)
            _, response = messages.decode_response_frame(key, version, frame)
        except (MansioError, WireError) as error:
            raise CoordinatorNotAvailable(f"the coordinator did not answer: {error}") from error
        if response.error_code:
            raise error_for_code(response.error_code)
