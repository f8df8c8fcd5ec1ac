"""One row of the table of group settings, and how the texts of settings are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.config.config_def import ConfigType


@dataclass(frozen=True, slots=True)
class GroupConfigKey:
    """One row of the table. `broker_setting`: Mansio's setting that holds for groups which say nothing, under Kafka's
    `broker_name`; both are empty where the broker has none; `default`: its text if it is not set either. `parse`: text
    to value, or `ValueError`."""

    name: str
    kind: ConfigType
    broker_setting: str
    broker_name: str
    default: str
    meaning: str
    parse: Callable[[str], Any]


def milliseconds(minimum: int, maximum: int) -> Callable[[str], int]:
    return _integer_between(minimum, maximum, "a number of milliseconds")


def count(minimum: int, maximum: int) -> Callable[[str], int]:
    return _integer_between(minimum, maximum, "a whole number")


def _integer_between(minimum: int, maximum: int, kind: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\s*\d{1,10}\s*", text, re.ASCII):
            raise ValueError(f"{text!r} is not {kind}")
        value = int(text)
        if not minimum <= value <= maximum:
            raise ValueError(f"{value} is not within {minimum} and {maximum}")
        return value

    return parse


def number(minimum: float, maximum: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not re.fullmatch(r"\s*\d{1,10}(\.\d{1,10})?\s*", text, re.ASCII):
            raise ValueError(f"{text!r} is not a number")
        value = float(text)
        if not minimum <= value <= maximum:
            raise ValueError(f"{value} is not within {minimum} and {maximum}")
        return value

    return parse


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in choices:
            raise ValueError(f"{text!r} is none of {', '.join(choices)}")
        return value

    return parse
