"""A `TransactionVerifier` of a broker in tests that has no transaction coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import CoordinatorNotAvailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.errors import MansioError


class NoCoordinator:
    """Refuses each verification."""

    async def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[tuple[str, int]],
        *,
        adds: bool,
    ) -> list[MansioError | None]:
        raise CoordinatorNotAvailable
