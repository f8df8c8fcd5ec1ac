"""Names of topics: of internal ones, of dead-letter topics, and of the queues of other systems.

Invariant: a derived name depends on the given name only, and two names have different derived names: one that had to be
changed ends with a digest of the whole name.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

TOPIC_NAME_CHARACTERS_MAX: Final = 249

OFFSETS_TOPIC: Final = "__consumer_offsets"
"""Internal topic of the groups and their offsets."""

AUDIT_TOPIC: Final = "__mansio_audit"
"""Internal topic of the audit."""

TRACE_TOPIC: Final = "__mansio_trace"
"""Internal topic of the trace of records."""

EVENT_TOPICS: Final = frozenset({AUDIT_TOPIC, TRACE_TOPIC})
"""Internal topics whose records no state depends on: retention deletes the oldest ones, and brokers append to them
through the broker that leads the partition."""

DEAD_LETTER_PREFIX: Final = "dlq."
"""Default beginning of the names of dead-letter topics."""

DIGEST_BYTES: Final = 8
_MARK_CHARACTERS: Final = 1 + 2 * DIGEST_BYTES

_INVALID: Final = re.compile(r"[^a-zA-Z0-9._-]")


def unified_name(name: str) -> str:
    """Return a name as it is in Kafka's metric names, where `.` and `_` are the same."""
    return name.replace(".", "_")


def marked_name(name: str, kept_characters_max: int = TOPIC_NAME_CHARACTERS_MAX - _MARK_CHARACTERS) -> str:
    """Return the beginning of a name, with `-` for characters that no topic has, and a digest of the whole name: 17
    characters more than are kept."""
    digest = hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES).hexdigest()
    return f"{valid_characters(name, kept_characters_max)}-{digest}"


def valid_characters(name: str, characters_max: int) -> str:
    """Return the beginning of a name, with `-` for characters that no topic has."""
    return _INVALID.sub("-", name)[:characters_max]


def dead_letter_topic_of(topic: str, prefix: str = DEAD_LETTER_PREFIX) -> str:
    """Return the default name of a topic's dead-letter topic, shortened if it would be too long for a topic."""
    name = f"{prefix}{topic}"
    return name if len(name) <= TOPIC_NAME_CHARACTERS_MAX else marked_name(name)
