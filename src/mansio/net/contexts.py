"""Contexts of the user: addresses of clusters, and how to connect to each of them; and where a client's settings come
from.

What a caller does not give is taken from the environment (`MANSIO_TLS`, `MANSIO_USER`, `MANSIO_PASSWORD`,
`MANSIO_MECHANISM`, `MANSIO_TOKEN`, `MANSIO_TOKEN_ENDPOINT`, `MANSIO_TOKEN_SCOPE`, `MANSIO_API_KEY`,
`MANSIO_CERTIFICATE`, `MANSIO_KEY`), then from the user's context for the same addresses. A context
applies to its own addresses only, and to the brokers that their cluster names.

A file `contexts.toml` in the user's directory of configuration (`$XDG_CONFIG_HOME/mansio`, by default
`~/.config/mansio`) has the contexts by name, and the name of the current one, whose addresses commands use. The
environment variable MANSIO_CONTEXT names another one.

Invariants:
* The file contains passwords: it is created with mode 0600, and refused if others may read it.
* It is replaced as a whole.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import ConfigError
from mansio.net.addresses import parse_addresses
from mansio.net.security_settings import IDENTITIES, VARIABLES, SecuritySettings, parse_tls

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

CONTEXT_VARIABLE: Final = "MANSIO_CONTEXT"
FILE_NAME: Final = "contexts.toml"
FILE_BYTES_MAX: Final = 1 << 20
CONTEXTS_MAX: Final = 1_000
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOT_STORED: Final = frozenset(
    {"key_password", "authorities", "checks_name", "delegation_token", "token", "token_provider"}
)
_STORED: Final = tuple(one.name for one in fields(SecuritySettings) if one.name not in _NOT_STORED)


@dataclass(frozen=True, slots=True)
class Context:
    """One cluster of the user."""

    bootstrap_servers: str
    security: SecuritySettings = field(default_factory=SecuritySettings)


@dataclass(frozen=True, slots=True)
class Contexts:
    """The contexts by name, and the name of the current one; None: there is none."""

    by_name: Mapping[str, Context] = field(default_factory=dict)
    current: str | None = None

    def current_context(self) -> Context | None:
        """Return the context that MANSIO_CONTEXT names, else the current one. Raises `ConfigError`."""
        name = os.environ.get(CONTEXT_VARIABLE) or self.current
        if name is None:
            return None
        found = self.by_name.get(name)
        if found is None:
            raise ConfigError(f"there is no context {name!r}; mansio context list shows them")
        return found


def contexts_path() -> str:
    """Return the name of the file."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(base, "mansio", FILE_NAME)


def load_contexts(*, is_necessary: bool = False) -> Contexts:
    """Read the file; without one there are no contexts. Raises `ConfigError` if others may read it.

    A process may run as a user who cannot reach the home directory of its environment (cron, a service). It has no
    contexts then, unless `is_necessary`, or unless MANSIO_CONTEXT names one.
    """
    path = contexts_path()
    try:
        with open(path, "rb") as file:
            _check_access(path, os.fstat(file.fileno()))
            content = file.read(FILE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    except OSError as error:
        if isinstance(error, PermissionError) and not (is_necessary or os.environ.get(CONTEXT_VARIABLE)):
            return Contexts()
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    import tomllib  # takes longer than the rest of this module

    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: more than {FILE_BYTES_MAX} bytes")
    try:
        document = tomllib.loads(content.decode())
    except ValueError as error:
        line = re.search(r"line \d+", str(error))
        raise ConfigError(f"{path}: not TOML{f' ({line[0]})' if line else ''}") from None
    return _parse(path, document)


def store_contexts(contexts: Contexts) -> None:
    """Replace the file. Raises `ConfigError`."""
    from mansio.host.private_file import PRIVATE_DIRECTORY_MODE, write_private_file

    if len(contexts.by_name) > CONTEXTS_MAX:
        raise ConfigError(f"at most {CONTEXTS_MAX} contexts are possible")
    path = contexts_path()
    try:
        os.makedirs(os.path.dirname(path), PRIVATE_DIRECTORY_MODE, exist_ok=True)
        write_private_file(path, _format(contexts).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def context_for(addresses: Sequence[tuple[str, int]]) -> SecuritySettings | None:
    """Return the settings of the context to which all these addresses belong, the current one before others; None if
    there is none."""
    contexts = load_contexts()
    if not contexts.by_name:
        return None
    current = contexts.current_context()
    candidates = ([] if current is None else [current]) + [*contexts.by_name.values()]
    for one in candidates:
        if set(addresses) <= set(parse_addresses(one.bootstrap_servers)):
            return one.security
    return None


def resolve_security(
    bootstrap_servers: str | Iterable[str], given: Mapping[str, Any] | None = None
) -> SecuritySettings:
    """Return the settings for a cluster: what is `given` (name -> value; None: not given), else that of the
    environment, else that of the user's context for these addresses. The password of another user is not
    taken. Raises `ConfigError`."""
    found = context_for(parse_addresses(bootstrap_servers))
    values = {} if found is None else {one.name: getattr(found, one.name) for one in fields(SecuritySettings)}
    environment: dict[str, Any] = {
        name: os.environ[variable] for name, variable in VARIABLES.items() if variable in os.environ
    }
    if "tls" in environment:
        environment["tls"] = parse_tls(environment["tls"])
    stated = {name: value for name, value in (given or {}).items() if value is not None}
    for nearer in (environment, stated):
        if any(name in nearer for name in IDENTITIES):  # a password belongs to the user beside it
            for name in (*IDENTITIES, "password"):
                values.pop(name, None)
            if not nearer.get("user"):
                values.pop("token_endpoint", None)
                values.pop("mechanism", None)
        values |= nearer
    return SecuritySettings(**values)


def _check_access(path: str, found: os.stat_result) -> None:
    if sys.platform == "win32":
        return  # it has no such modes
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"{path} contains passwords, and others may read it (mode {mode:04o}): chmod 600 {path}"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path} contains passwords, and belongs to another user")


def _parse(path: str, document: Mapping[str, Any]) -> Contexts:
    tables, current = document.get("contexts", {}), document.get("current")
    unknown = document.keys() - {"contexts", "current"}
    if unknown or not isinstance(tables, dict) or not isinstance(current, str | None):
        raise ConfigError(f"{path}: it has a table `contexts` and a name `current`, and nothing else")
    return Contexts(
        {name: _parse_context(f"{path}: {name}", table) for name, table in tables.items()}, current
    )


def _parse_context(where: str, table: Any) -> Context:
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: not a table")
    values = dict(table)
    servers = values.pop("bootstrap_servers", None)
    unknown = values.keys() - set(_STORED)
    if unknown:
        raise ConfigError(f"{where}: there is no setting {min(unknown)!r}")
    for name, value in {"bootstrap_servers": servers, **values}.items():
        if not isinstance(value, str) and not (name == "tls" and isinstance(value, bool)):
            raise ConfigError(f"{where}: {name} is not a text")
    try:
        parse_addresses(servers)
        return Context(servers, SecuritySettings(**values))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from None


def _format(contexts: Contexts) -> str:
    lines = [] if contexts.current is None else [f"current = {_text(contexts.current)}"]
    for name, one in sorted(contexts.by_name.items()):
        lines += ["", f"[contexts.{_text(name)}]", f"bootstrap_servers = {_text(one.bootstrap_servers)}"]
        settings = asdict(one.security)
        for key in _STORED:
            value = settings[key]
            if value is True:
                lines.append(f"{key} = true")
            elif value:
                lines.append(f"{key} = {_text(value)}")
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """Return a text as a basic string of TOML, whose escapes include those of JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
