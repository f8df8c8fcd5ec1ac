"""Interface by which the leader of a partition verifies a transactional batch with the transaction coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.errors import MansioError


class TransactionVerifier(Protocol):
    """Verification of partitions with the coordinator of a transaction (KIP-890)."""

    async def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[tuple[str, int]],
        *,
        adds: bool,
    ) -> list[MansioError | None]:
        """Return None or an error for each partition (topic, index).

        `adds` False: the partition must be in the ongoing transaction (part 1 of KIP-890). `adds` True: the partition
        is added to the transaction (part 2; Produce 12+ and TxnOffsetCommit 5+)."""
