"""Definitions of dynamic settings: names, types, defaults, validation and incremental changes (Kafka's ConfigDef).

`topic_config`, `group_config` and `broker_config` each define one `ConfigDef`. Values are stored as canonical
text (`ConfigDef.normalize`), because DescribeConfigs returns text.

Invariant: a setting without effect is not accepted silently. It is either rejected with the reason (`unsupported`, or a
value that its validator rejects), or stored and documented with the reason (`no_effect`), which is logged when it is
set; `effect` states when a change becomes effective.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from mansio.errors import InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Number = TypeVar("Number", int, float)

INT64_MAX: Final = (1 << 63) - 1
INT32_MAX: Final = (1 << 31) - 1


class ConfigType(IntEnum):
    """Type of a setting, with the numbers of DescribeConfigs version 3 (KIP-569)."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    DOUBLE = 6
    LIST = 7


class ResourceType(IntEnum):
    """Kinds of resources that have settings, as Kafka numbers them."""

    TOPIC = 2
    BROKER = 4
    GROUP = 32


class Operation(IntEnum):
    """Operation of IncrementalAlterConfigs on one setting (KIP-339)."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class Change(NamedTuple):
    """One incremental change; `value` is None only for DELETE."""

    name: str
    operation: int
    value: str | None


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """Definition of one setting.

    `parse` converts text to a value, or raises `ValueError` with the reason. `broker_name`: Kafka's name of the broker
    setting that determines the default; `broker_setting`: in group settings, the field of `Settings` with that meaning;
    both are empty if brokers have no such setting. `no_effect`: why the setting is stored but not used, or empty.
    """

    name: str
    kind: ConfigType
    default: str
    broker_name: str
    meaning: str
    parse: Callable[[str], Any]
    effect: str = ""
    broker_setting: str = ""
    no_effect: str = ""


class ConfigDef:
    """The settings of one type of resource: topics, groups or brokers. `unsupported`: name -> reason, for Kafka's
    settings that are rejected."""

    def __init__(self, resource: str, keys: Iterable[ConfigKey], *, unsupported: Mapping[str, str]) -> None:
        self.keys: dict[str, ConfigKey] = {key.name: key for key in keys}
        self._resource = resource
        self._unsupported = unsupported
        self._has_lists = any(key.kind is ConfigType.LIST for key in self.keys.values())

    def key(self, name: str) -> ConfigKey:
        """Return the definition of a setting. Raises `InvalidConfig` for an unknown or unsupported name."""
        key = self.keys.get(name)
        if key is not None:
            return key
        if name in self._unsupported:
            raise InvalidConfig(f"{name} is not supported: {self._unsupported[name]}")
        import difflib  # only for an error: it takes a tenth of the start time of an embedded broker

        similar = difflib.get_close_matches(str(name), list(self.keys), n=1, cutoff=0.6)
        hint = f"; did you mean {similar[0]}?" if similar else ""
        raise InvalidConfig(f"{name}: no such {self._resource} setting{hint}")

    def parse(self, name: str, text: str | None) -> Any:
        """Parse the value of a setting. Raises `InvalidConfig`, one line that contains the name."""
        key = self.key(name)
        if text is None:
            raise InvalidConfig(f"{name}: a value is required")
        try:
            return key.parse(text)
        except ValueError as error:
            raise InvalidConfig(f"{name}: {error}") from error

    def normalize(self, name: str, text: str | None) -> str:
        """Return the canonical text of a value, as it is stored: without whitespace around it, numbers as Python writes
        them, booleans in lower case. Raises `InvalidConfig`."""
        value = self.parse(name, text)
        return ",".join(value) if isinstance(value, tuple) else str(value)

    def apply_changes(
        self,
        overrides: Mapping[str, str],
        changes: Iterable[Change],
        default_of: Callable[[ConfigKey], str] = lambda key: key.default,
    ) -> dict[str, str]:
        """Return the overrides after incremental changes (KIP-339). `default_of`: returns the value that APPEND and
        SUBTRACT change if the setting has no override.

        DELETE of a setting without an override changes nothing, whatever its name: tools remove settings that they may
        have set before. Raises `InvalidConfig` for an invalid setting or value, `InvalidRequest` for an invalid
        request.
        """
        result = dict(overrides)
        seen: set[str] = set()
        for name, operation, value in changes:
            if name in seen:
                raise InvalidRequest(f"{name} is changed twice in one request")
            seen.add(name)
            if operation == Operation.DELETE:
                result.pop(name, None)
                continue
            is_list_change = operation in (Operation.APPEND, Operation.SUBTRACT)
            if is_list_change and not self._has_lists:
                raise InvalidConfig(f"{name}: append and subtract apply to lists only")
            if operation != Operation.SET and not is_list_change:
                raise InvalidRequest(f"{name}: unknown operation {operation}")
            if value is None:
                raise InvalidRequest(f"{name}: a value is required")
            if is_list_change:
                key = self.key(name)
                if key.kind is not ConfigType.LIST:
                    raise InvalidConfig(f"{name}: append and subtract apply to lists only")
                value = _changed_list(result.get(name, default_of(key)), operation, value)
            result[name] = self.normalize(name, value)
        return result


def _changed_list(current: str, operation: int, value: str) -> str:
    items = [part for part in current.split(",") if part]
    changed = [part.strip() for part in value.split(",") if part.strip()]
    if operation == Operation.APPEND:
        return ",".join(items + [part for part in changed if part not in items])
    return ",".join(part for part in items if part not in changed)


# ---------------------------------------------------------------------- validators


def integer_parser(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `minimum` to `maximum`, both included."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\s*-?\d{1,19}\s*", text, re.ASCII):
            raise ValueError(f"{text!r} is not a whole number")
        return _check_bounds(int(text), minimum, maximum)

    return parse


def decimal_parser(minimum: float, maximum: float) -> Callable[[str], float]:
    """Return a parser of decimal numbers from `minimum` to `maximum`, both included; it rejects infinity, hexadecimal
    digits and underscores."""

    def parse(text: str) -> float:
        if not re.fullmatch(r"\s*-?(\d{1,19}(\.\d{0,19})?|\.\d{1,19})([eE]-?\d{1,3})?\s*", text, re.ASCII):
            raise ValueError(f"{text!r} is not a number such as 0.5")
        return _check_bounds(float(text), minimum, maximum)

    return parse


def _check_bounds(value: Number, minimum: Number, maximum: Number) -> Number:
    if value < minimum:
        raise ValueError(f"{value} is below the minimum of {minimum}")
    if value > maximum:
        raise ValueError(f"{value} is above the maximum of {maximum}")
    return value


def choice_parser(
    *choices: str, refused: Mapping[str, str] | None = None, ignore_case: bool = False
) -> Callable[[str], str]:
    """Return a parser that accepts the words `choices`. `refused`: value -> reason, for values that Kafka accepts and
    Mansio does not."""

    def parse(text: str) -> str:
        value = text.strip().lower() if ignore_case else text.strip()
        if value in choices:
            return value
        reason = (refused or {}).get(value)
        raise ValueError(
            f"{value!r}: {reason}" if reason else f"{value!r} is not one of {', '.join(choices)}"
        )

    return parse
