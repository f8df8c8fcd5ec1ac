"""Settings of the transaction coordinator; a comment names the Kafka setting with the same meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mansio.config.settings import Settings

COMPLETION_WAIT_MS: Final = 100
"""Maximum time for which a request waits for the completion of a transaction, before it gets
CONCURRENT_TRANSACTIONS. Clients pause at least this long before they try again."""

CHECK_INTERVAL_MS_MIN: Final = 100
"""Shortest time between two checks for transactions whose time is over."""

TRANSACTIONAL_ID_BYTES_MAX: Final = 32_767


@dataclass(frozen=True, slots=True)
class TransactionSettings:
    """Limits and timeouts of the transaction coordinator.

    `transactional_ids_max` and `partitions_max` bound the memory: transactional ids of this broker, and partitions of
    one transaction. `held_ms_max`: time after which a held transaction is aborted. `queries_max`: maximum number of
    queries on this broker with which a new query may commit a batch; with up to twice as many it may still abort. A
    query is forgotten when it has not committed a batch for `query_expiration_ms`. `batch_commit_wait_ms`: maximum time
    for which the commit of a batch waits for its transactions.
    """

    timeout_ms_max: int = 15 * 60_000  # transaction.max.timeout.ms
    expiration_ms: int = 7 * 24 * 60 * 60_000  # transactional.id.expiration.ms
    expiration_check_interval_ms: int = (
        60 * 60_000
    )  # transaction.remove.expired.transaction.cleanup.interval.ms
    transactional_ids_max: int = 1_000_000
    partitions_max: int = 100_000
    held_ms_max: int = 24 * 60 * 60_000
    queries_max: int = 100_000
    query_expiration_ms: int = 365 * 24 * 60 * 60_000
    batch_commit_wait_ms: int = 20_000


def transaction_settings(settings: Settings) -> TransactionSettings:
    """Return the transaction coordinator's settings, taken from the broker's settings."""
    return TransactionSettings(
        timeout_ms_max=settings.transaction_max_timeout_ms,
        expiration_ms=settings.transactional_id_expiration_ms,
        held_ms_max=settings.transaction_prepared_max_ms,
    )
