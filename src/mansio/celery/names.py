"""Topic names of queues and exchanges.

Invariants:
* The name depends on the queue's or exchange's name only, so that all processes use the same topic.
* Two queues, and a queue and an exchange, have different topics.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

EXCHANGE_PREFIX: Final = "exchange."
"""Beginning of the topics of exchanges, and of no topic of a queue."""

NAME_CHARACTERS_MAX: Final = 200
"""Length above which a name is shortened: Kafka's limit is 249, and `dlq.` comes before it."""

DIGEST_BYTES: Final = 8

_INVALID = re.compile(r"[^a-zA-Z0-9._-]")


def topic_of_queue(queue: str) -> str:
    """The topic, and the share group, of a queue: its name, if that can be the name of a topic."""
    if queue.startswith((EXCHANGE_PREFIX, "dlq.", "__")):
        return f"queue.{_valid(queue)}-{_digest(queue)}"
    return _valid_or_marked(queue)


def topic_of_exchange(exchange: str) -> str:
    """The topic of an exchange whose messages go to the queues of single processes."""
    return EXCHANGE_PREFIX + _valid_or_marked(exchange)


def _valid_or_marked(name: str) -> str:
    valid = _valid(name)
    return valid if valid == name and name not in (".", "..") else f"{valid}-{_digest(name)}"


def _valid(name: str) -> str:
    return _INVALID.sub("-", name)[:NAME_CHARACTERS_MAX]


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES).hexdigest()
