"""One row of the table of topic settings, and how the texts of settings are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

INT64_MAX: Final = (1 << 63) - 1
INT32_MAX: Final = (1 << 31) - 1
DELETE: Final = "delete"
COMPACT: Final = "compact"


class ConfigType(IntEnum):
    """The type of a setting as DescribeConfigs v3 tells it (KIP-569)."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    DOUBLE = 6
    LIST = 7


@dataclass(frozen=True, slots=True)
class TopicConfigKey:
    """One row of the table. `broker_name`: what Kafka calls the setting of brokers that is the default for topics.
    `parse` takes the text and gives the value, or raises `ValueError` with the reason."""

    name: str
    kind: ConfigType
    default: str
    broker_name: str
    meaning: str
    parse: Callable[[str], Any]
    effect: str = ""


def integer_between(minimum: int, maximum: int) -> Callable[[str], int]:
    """A whole number, both bounds included."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\s*-?\d{1,19}\s*", text, re.ASCII):
            raise ValueError(f"{text!r} is not a whole number")
        value = int(text)
        if value < minimum:
            raise ValueError(f"{value} is below the least, {minimum}")
        if value > maximum:
            raise ValueError(f"{value} is above the most, {maximum}")
        return value

    return parse


def fraction(text: str) -> float:
    """A number from 0 to 1; only plain ones, so that what is shown is what was meant."""
    if not re.fullmatch(r"\s*-?(\d{1,19}(\.\d{0,19})?|\.\d{1,19})([eE]-?\d{1,3})?\s*", text, re.ASCII):
        raise ValueError(f"{text!r} is not a number such as 0.5")
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(f"{value} is not between 0 and 1")
    return value


def one_of(*choices: str, refused: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """One of these words; `refused`: why others are none of them, although Kafka has them."""

    def parse(text: str) -> str:
        value = text.strip()
        if value in choices:
            return value
        reason = (refused or {}).get(value)
        raise ValueError(
            f"{value!r}: {reason}" if reason else f"{value!r} is not one of {', '.join(choices)}"
        )

    return parse


def cleanup_policy(text: str) -> tuple[str, ...]:
    """One policy or both, each once, in the order given."""
    policies = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for policy in policies:
        if policy not in (COMPACT, DELETE):
            raise ValueError(f"{policy!r} is not a cleanup policy: delete, compact or compact,delete")
    if not policies:
        raise ValueError("at least one policy is needed")
    return policies
