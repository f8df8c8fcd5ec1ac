"""Interface with which the produce and offset services ask a transaction coordinator about a transaction (KIP-890)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.errors import MansioError


class TransactionVerifier(Protocol):
    """Asks the coordinator of a transactional id, on this broker or on another one."""

    async def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[tuple[str, int]],
        *,
        adds: bool,
    ) -> list[MansioError | None]:
        """Return None for each partition (topic, index) that belongs to the ongoing transaction of the producer, and
        the error for each other one. `adds`: partitions that do not belong to it are added, as clients of Produce 12+
        expect; otherwise the client has added them. Raises a `MansioError` that concerns all partitions."""
