"""Texts of options into values: words, numbers, sizes, times, and the JSON that says offsets per partition.

Spark hands every option over as text. Pure. Always true: a text that is not what the option wants raises `ConfigError`,
one line that names the option, the text and what would be right.
"""

from __future__ import annotations

import json
import re
import warnings
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import ConfigError
from mansio.net.offsets import EARLIEST, LATEST
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Sequence

SHOWN_CHARACTERS_MAX: Final = 120
"""So much of a wrong text is repeated in the error."""

NUMBER_MAX: Final = (1 << 63) - 1
"""Offsets and times have 64 bits on the wire."""

OFFSET_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}

_SIZE: Final = re.compile(r"(\d{1,15})\s*(?:(k|m|g)i?b?|b)?", re.IGNORECASE)
_SIZE_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_TIME: Final = re.compile(r"(\d{1,12})\s*(ms|s|m|min|h|d)?", re.IGNORECASE)
_TIME_UNITS_MS: Final = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}


def invalid_option(name: str, text: str, wanted: str) -> ConfigError:
    """The error for an option whose text is not what it has to be."""
    shown = text if len(text) <= SHOWN_CHARACTERS_MAX else text[:SHOWN_CHARACTERS_MAX] + "..."
    return ConfigError(f"option {name} is {shown!r}: {wanted}")


def to_flag(name: str, text: str) -> bool:
    """`true` or `false`, in any case."""
    if text.strip().lower() not in ("true", "false"):
        raise invalid_option(name, text, "give true or false")
    return text.strip().lower() == "true"


def to_choice(name: str, text: str, choices: Sequence[str]) -> str:
    """One of a few words, in any case."""
    word = text.strip().lower()
    if word not in choices:
        raise invalid_option(name, text, f"give {' or '.join(choices)}")
    return word


def to_count(name: str, text: str, lowest: int = 1) -> int:
    """A whole number of at least `lowest`."""
    try:
        number = int(text.strip())
    except ValueError:
        raise invalid_option(name, text, f"give a whole number of at least {lowest}") from None
    if not lowest <= number <= NUMBER_MAX:
        raise invalid_option(name, text, f"give a whole number of at least {lowest}")
    return number


def to_bytes(name: str, text: str, lowest: int, highest: int) -> int:
    """A size in bytes: `4194304`, `4096k`, `4MB`. Units are powers of 1,024."""
    found = _SIZE.fullmatch(text.strip())
    size = int(found[1]) * _SIZE_UNITS[(found[2] or "").lower()] if found else -1
    if not lowest <= size <= highest:
        raise invalid_option(name, text, f"give a size such as 4MB, from {lowest} to {highest} bytes")
    return size


def to_milliseconds(name: str, text: str) -> int:
    """A time such as `500ms`, `30s`, `15m`, `2h`; without a unit, milliseconds as in Spark."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise invalid_option(name, text, "give a time such as 500ms, 30s, 15m or 2h")
    return int(found[1]) * _TIME_UNITS_MS[(found[2] or "ms").lower()]


def to_offsets(name: str, text: str) -> int | dict[TopicPartition, int]:
    """`earliest`, `latest` (as -2 and -1), or JSON such as `{"flights": {"0": 23, "1": -2}}`."""
    word = OFFSET_WORDS.get(text.strip().lower())
    if word is not None:
        return word
    wanted = 'give earliest, latest, or JSON such as {"topic": {"0": 23, "1": -2}} (-2: earliest, -1: latest)'
    return _per_partition(name, text, EARLIEST, wanted)


def to_timestamps(name: str, text: str) -> dict[TopicPartition, int]:
    """JSON such as `{"flights": {"0": 1700000000000}}`: milliseconds since the epoch."""
    wanted = 'give JSON such as {"topic": {"0": 1700000000000}}, in milliseconds since the epoch'
    return _per_partition(name, text, 0, wanted)


def to_assignment(name: str, text: str) -> tuple[TopicPartition, ...]:
    """JSON such as `{"flights": [0, 1]}`."""
    wanted = 'give JSON such as {"topic": [0, 1]}'
    found: set[TopicPartition] = set()
    for topic, partitions in _object(name, text, wanted).items():
        if not isinstance(partitions, list) or not all(_is_index(partition) for partition in partitions):
            raise invalid_option(name, text, wanted)
        found.update(TopicPartition(topic, partition) for partition in partitions)
    if not found:
        raise invalid_option(name, text, wanted)
    return tuple(sorted(found))


def to_texts(name: str, text: str) -> dict[str, str]:
    """JSON of texts by topic, such as `{"flights": "5f0c..."}`."""
    wanted = 'give JSON such as {"topic": "text"}'
    found = _object(name, text, wanted)
    if not all(isinstance(value, str) for value in found.values()):
        raise invalid_option(name, text, wanted)
    return found


def to_names(name: str, text: str) -> tuple[str, ...]:
    """Names between commas; none twice, at least one."""
    names = [part.strip() for part in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise invalid_option(name, text, "give names with commas between them, each once")
    return tuple(names)


def to_pattern(name: str, text: str) -> str:
    """A regular expression that Python can read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error", FutureWarning
            )  # `[[`, `--` and the like: sets to Java, something else to us
            re.compile(text)
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        raise invalid_option(name, text, f"not a regular expression: {error}") from None
    return text


def _per_partition(name: str, text: str, lowest: int, wanted: str) -> dict[TopicPartition, int]:
    found: dict[TopicPartition, int] = {}
    for topic, partitions in _object(name, text, wanted).items():
        if not isinstance(partitions, dict):
            raise invalid_option(name, text, wanted)
        for index, value in partitions.items():
            if (
                not index.isascii()
                or not index.isdigit()
                or type(value) is not int
                or not lowest <= value <= NUMBER_MAX
            ):
                raise invalid_option(name, text, wanted)
            found[TopicPartition(topic, int(index))] = value
    return found


def _object(name: str, text: str, wanted: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise invalid_option(name, text, wanted) from None
    if not isinstance(found, dict):
        raise invalid_option(name, text, wanted)
    return found


def _is_index(value: object) -> bool:
    return type(value) is int and value >= 0
