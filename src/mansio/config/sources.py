"""Settings from a file, the environment and flags, read with pydantic-settings.

Separate from `mansio.config.settings` because importing pydantic takes longer than starting an embedded broker.

Invariants: an unknown key is an error in every source, with a suggestion of the nearest known one; every error is one
line with the key, the problem and the origin (file, environment or flag).
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from typing import TYPE_CHECKING, Annotated, Any, Final

import pydantic
import yaml
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    SettingsError,
    TomlConfigSettingsSource,
    YamlConfigSettingsSource,
)

from mansio.config import topic_config
from mansio.config.protected_start import protected_values
from mansio.config.settings import SPECIFICATIONS, Origin, Settings, default_of, suggestion
from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVIRONMENT_PREFIX: Final = "MANSIO_"
OTHER_VARIABLES: Final = frozenset(
    {
        *("MANSIO_BOOTSTRAP_SERVERS", "MANSIO_CONFIG", "MANSIO_CONTEXT", "MANSIO_OUTPUT", "MANSIO_TRACING"),
        *(
            "MANSIO_TLS",
            "MANSIO_USER",
            "MANSIO_PASSWORD",
            "MANSIO_MECHANISM",
            "MANSIO_CERTIFICATE",
            "MANSIO_KEY",
        ),
    }
)
"""Variables that clients and commands read, and a broker does not."""
OTHER_PREFIXES: Final = ("MANSIO_TEST_", "MANSIO_BENCH_")
# Kubernetes sets these in every container beside a service that is named mansio or mansio-something.
_SERVICE_LINK: Final = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_\w+)?)?)$")

_NAMES_BY_KAFKA_NAME: Final = {one.kafka_name: name for name, one in SPECIFICATIONS.items() if one.kafka_name}

_UNITS: Final = {
    "bytes": {
        "": 1,
        "b": 1,
        "kb": 10**3,
        "mb": 10**6,
        "gb": 10**9,
        "kib": 1 << 10,
        "mib": 1 << 20,
        "gib": 1 << 30,
    },
    "ms": {"": 1, "ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000},
}


def parse_quantity(value: Any, unit: str) -> Any:
    """Convert a number with a unit, such as `64 MiB` or `5 s`, to bytes or ms. Other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", value)
    factor = _UNITS[unit].get(match[2].lower()) if match else None
    if match is None or factor is None:
        known = ", ".join(name for name in _UNITS[unit] if name)
        raise ValueError(f"{value!r} is not a number of {unit} (units: {known})")
    return int(match[1]) * factor


def load_settings(
    file: str | None = None,
    flags: Mapping[str, Any] | None = None,
    *,
    environment: bool = True,
    is_protected: bool = False,
) -> Settings:
    """Read settings from a YAML or TOML file, the environment (`MANSIO_<NAME>`) and flags (None: not given).
    `is_protected`: change them as a protected start does (`protected_values`).

    Files and flags may use Kafka's name of a setting (`log.flush.interval.ms`). Raises `ConfigError`, one line with the
    name of the key and its origin.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(SPECIFICATIONS, Origin.DEFAULT)
    topic_defaults: dict[str, Any] = {}
    sources: list[tuple[Origin, dict[str, Any]]] = []
    if file is not None:
        sources.append((Origin.FILE, _from_file(file)))
    if environment:
        sources.append((Origin.ENVIRONMENT, _from_environment()))
    sources.append((Origin.FLAG, _from_flags(flags or {})))
    for origin, raw in sources:
        where = f"file {file}" if origin is Origin.FILE else str(origin)
        read = _validate_values(raw, where)
        for name, value in (read.pop("topic_defaults", None) or {}).items():
            topic_defaults[name] = value
            origins[f"topic_defaults.{name}"] = origins["topic_defaults"] = origin
        values |= read
        origins |= dict.fromkeys(read, origin)
    origins |= {
        f"topic_defaults.{name}": Origin.DEFAULT
        for name in topic_config.SETTINGS
        if name not in topic_defaults
    }
    try:
        if is_protected:
            changed = protected_values(values)
            values |= changed
            origins |= dict.fromkeys(changed, Origin.FLAG)
        return Settings(**values, topic_defaults=topic_defaults, origins=origins)
    except ConfigError as error:
        key = str(error).partition(":")[0]
        origin = origins.get(key, Origin.DEFAULT)
        raise ConfigError(
            str(error) if origin is Origin.DEFAULT else f"{error} (from the {origin})"
        ) from error


def _from_file(file: str) -> dict[str, Any]:
    kind = TomlConfigSettingsSource if file.endswith(".toml") else YamlConfigSettingsSource
    if not os.path.isfile(file):
        raise ConfigError(f"configuration file {file}: not found")
    try:
        return _with_own_names(dict(kind(_Sources, file)()), f"file {file}")
    except (yaml.YAMLError, tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise ConfigError(f"configuration file {file}: {' '.join(str(error).split())}") from error


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    given = _with_own_names(
        {name: value for name, value in flags.items() if value is not None}, str(Origin.FLAG)
    )
    table = given.get("topic_defaults")
    if isinstance(table, str):  # on a command line every value is text
        try:
            given["topic_defaults"] = json.loads(table)
        except ValueError as error:
            raise ConfigError(
                'topic_defaults: not JSON, such as {"retention.ms": 60000} (from the flag)'
            ) from error
    return given


def _with_own_names(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Replace Kafka's setting names by ours, with the value in our unit."""
    renamed: dict[str, Any] = {}
    for key, value in given.items():
        name = _NAMES_BY_KAFKA_NAME.get(key, key)
        if name in renamed:
            raise ConfigError(f"{key}: it is given as {name}, too (from the {where})")
        unit = SPECIFICATIONS[name].kafka_unit if name != key else 1
        renamed[name] = int(value) * unit if unit > 1 and str(value).isdecimal() else value
    return renamed


def _from_environment() -> dict[str, Any]:
    for variable in os.environ:
        name = variable.upper()
        if (
            name.startswith(ENVIRONMENT_PREFIX)
            and name.removeprefix(ENVIRONMENT_PREFIX).lower() not in SPECIFICATIONS
            and name not in OTHER_VARIABLES
            and not name.startswith(OTHER_PREFIXES)
            and not _SERVICE_LINK.search(name)
        ):
            known = [ENVIRONMENT_PREFIX + setting.upper() for setting in SPECIFICATIONS]
            raise ConfigError(f"{variable}: no such setting{suggestion(name, known)} (from the environment)")
    try:
        return dict(EnvSettingsSource(_Sources, env_prefix=ENVIRONMENT_PREFIX, case_sensitive=False)())
    except SettingsError as error:
        raise ConfigError('MANSIO_TOPIC_DEFAULTS: not JSON, such as {"retention.ms": 60000}') from error


def _validate_values(raw: dict[str, Any], where: str) -> dict[str, Any]:
    for name in raw:
        if name not in SPECIFICATIONS:
            raise ConfigError(
                f"{name}: no such setting{suggestion(str(name), SPECIFICATIONS)} (from the {where})"
            )
    try:
        return _Values.model_validate(raw).model_dump(exclude_unset=True)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{key}: {message[:1].lower()}{message[1:]} (from the {where})") from error


def _field(name: str) -> tuple[Any, Any]:
    specification = SPECIFICATIONS[name]
    default = default_of(name)
    if name == "topic_defaults":
        return (dict[str, str | int | float | bool | list[str]], default)
    if specification.unit:
        unit = specification.unit
        return (Annotated[int, pydantic.BeforeValidator(lambda value: parse_quantity(value, unit))], default)
    return (type(default), default)


class _Base(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", coerce_numbers_to_str=True)


_FIELDS: Final[dict[str, Any]] = {name: _field(name) for name in SPECIFICATIONS}
_Values: type[pydantic.BaseModel] = pydantic.create_model("_Values", __base__=_Base, **_FIELDS)
_Sources: type[BaseSettings] = pydantic.create_model("_Sources", __base__=BaseSettings, **_FIELDS)
