"""Topic names of queues and exchanges.

Invariants:
* The name depends on the queue's or exchange's name only, so that all processes use the same topic.
* Two queues, and a queue and an exchange, have different topics.
"""

from __future__ import annotations

from typing import Final

from mansio.config.topic_names import DEAD_LETTER_PREFIX, marked_name, valid_characters

EXCHANGE_PREFIX: Final = "exchange."
"""Beginning of the topics of exchanges, and of no topic of a queue."""

NAME_CHARACTERS_MAX: Final = 200
"""Length above which a name is shortened: Kafka's limit is 249, and `dlq.` comes before it."""


def topic_of_queue(queue: str) -> str:
    """Return the topic, and the share group, of a queue: its name, if that can be the name of a topic."""
    if queue.startswith((EXCHANGE_PREFIX, DEAD_LETTER_PREFIX, "__")):
        return f"queue.{marked_name(queue, NAME_CHARACTERS_MAX)}"
    return _valid_or_marked(queue)


def topic_of_exchange(exchange: str) -> str:
    """Return the topic of an exchange whose messages go to the queues of single processes."""
    return EXCHANGE_PREFIX + _valid_or_marked(exchange)


def _valid_or_marked(name: str) -> str:
    is_valid = valid_characters(name, NAME_CHARACTERS_MAX) == name and name not in (".", "..")
    return name if is_valid else marked_name(name, NAME_CHARACTERS_MAX)
