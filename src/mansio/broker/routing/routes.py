"""Routes: which partition of an internal topic stores a group, a transactional id or the state of a share partition."""

from __future__ import annotations

from typing import Final

_UNSIGNED: Final = 0xFFFFFFFF
_POSITIVE: Final = 0x7FFFFFFF


def java_string_hash(text: str) -> int:
    """Return Java's `String.hashCode` of a text, a 32-bit hash of its UTF-16 code units, as an unsigned number."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for position in range(0, len(units), 2):
        value = (31 * value + (units[position] << 8 | units[position + 1])) & _UNSIGNED
    return value


def partition_for(key: str, partition_count: int) -> int:
    """Return the partition of an internal topic that stores a group id, a transactional id, or the coordinator key of a
    share partition, as Apache Kafka chooses it."""
    return (java_string_hash(key) & _POSITIVE) % partition_count
