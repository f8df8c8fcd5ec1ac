"""Numbers with a meaning of their own in fields of Kafka's requests and record batches, named as in Kafka."""

from __future__ import annotations

from typing import Final

ACKS_ALL: Final = -1
"""`acks` of Produce: the response waits until every in-sync replica has the records."""
ACKS_NONE: Final = 0
"""`acks` of Produce: there is no response."""

READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1
"""`isolation_level` of Fetch and ListOffsets (KIP-98): up to the high watermark, or to the last stable offset without
aborted transactions."""

LATEST_TIMESTAMP: Final = -1
"""`timestamp` of ListOffsets that requests the offset after the last readable record."""
EARLIEST_TIMESTAMP: Final = -2
"""`timestamp` of ListOffsets that requests the log start offset."""
MAX_TIMESTAMP: Final = -3
"""`timestamp` of ListOffsets that requests the offset of the record with the greatest timestamp (KIP-734)."""
EARLIEST_LOCAL_TIMESTAMP: Final = -4
"""`timestamp` of ListOffsets that requests the first offset on the broker's own disk (KIP-405)."""
LATEST_TIERED_TIMESTAMP: Final = -5
"""`timestamp` of ListOffsets that requests the last offset in tiered storage (KIP-1005)."""

SEQUENCE_MAX: Final = 2**31 - 1
"""The largest sequence of a record of a producer; the next one is 0 (KIP-98)."""
PRODUCER_EPOCH_MAX: Final = 2**15 - 1
"""The largest epoch of a producer id; a producer needs another id afterwards (KIP-360). Of transactional producers only
markers have it: the epoch before it is the last one that a producer gets."""

NO_FETCH_SESSION_ID: Final = 0
"""Session id of a Fetch without a session (KIP-227)."""
OPEN_FETCH_SESSION_EPOCH: Final = 0
"""Epoch of a Fetch that names all its partitions and asks for a session (KIP-227)."""
FINAL_FETCH_SESSION_EPOCH: Final = -1
"""Epoch of a Fetch that names all its partitions and needs no session (KIP-227)."""
FETCH_SESSION_EPOCH_MAX: Final = 2**31 - 1
"""The largest epoch of a fetch session; the next one is 1 (KIP-227)."""

OPEN_SHARE_SESSION_EPOCH: Final = 0
"""Epoch of a request that opens a share session (KIP-932)."""
FINAL_SHARE_SESSION_EPOCH: Final = -1
"""Epoch of a request that closes a share session (KIP-932)."""
SHARE_SESSION_EPOCH_MAX: Final = 2**31 - 1
"""The largest epoch of a share session; the next one is 1 (KIP-932)."""
