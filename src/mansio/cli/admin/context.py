"""`mansio context`: add, use, list, remove the clusters of the user, with the way to connect to each of them.

Invariant: a password is read from a terminal, a file or standard input, never from the command line, which other users
of the machine see.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mansio.cli.support.common import usage_error
from mansio.cli.support.formatting import Output, OutputOption, show_rows

if TYPE_CHECKING:
    from mansio.net.contexts import Context

app = typer.Typer(no_args_is_help=True, help="Store addresses and credentials of clusters for all commands.")

COLUMNS: Final = ("current", "name", "bootstrap_servers", "protocol", "user")
PASSWORD_BYTES_MAX: Final = 64 << 10
STANDARD_INPUT: Final = "-"

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.")]


@app.callback()
def command_group() -> None:
    """Store addresses and credentials of clusters for all commands."""


@app.command("add")
def add_context(
    name: NameArgument,
    bootstrap_servers: Annotated[
        str,
        typer.Option(
            "--bootstrap-servers",
            "-b",
            metavar="HOST:PORT",
            help="Addresses of brokers (Kafka protocol), separated by commas.",
        ),
    ],
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt, and verify brokers with the authorities of the system.")
    ] = False,
    ca: Annotated[
        str | None,
        typer.Option(
            "--ca", metavar="FILE", help="Encrypt, and verify brokers with these authorities (PEM)."
        ),
    ] = None,
    user: Annotated[
        str | None,
        typer.Option("--user", "-u", metavar="NAME", help="User; the password is asked for on the terminal."),
    ] = None,
    password_file: Annotated[
        str | None,
        typer.Option(
            "--password-file",
            metavar="FILE",
            help="File whose first line is the password; - for standard input.",
        ),
    ] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(
            "--mechanism", metavar="NAME", help="SCRAM-SHA-256 (the default), SCRAM-SHA-512 or PLAIN."
        ),
    ] = None,
    api_key_file: Annotated[
        str | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help="File whose first line is an API key, instead of a user; - for standard input.",
        ),
    ] = None,
    certificate: Annotated[
        str | None, typer.Option("--certificate", metavar="FILE", help="Certificate of the client (PEM).")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="FILE", help="Key of the client's certificate (PEM).")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a context of this name.")] = False,
) -> None:
    """Store a context. The first one becomes the current one.

    The file, ~/.config/mansio/contexts.toml, is readable by its user only. Names of files are stored as absolute paths.
    """
    from mansio.net.addresses import parse_addresses
    from mansio.net.contexts import NAME_PATTERN, Context, Contexts, load_contexts, store_contexts
    from mansio.net.security_settings import SecuritySettings

    if not NAME_PATTERN.fullmatch(name):
        usage_error(f"{name!r} is not a name of letters, digits and ._-, at most 64", "NAME")
    if password_file is not None and user is None:
        usage_error("it needs --user", "--password-file")
    parse_addresses(bootstrap_servers)
    contexts = load_contexts(is_necessary=True)
    if name in contexts.by_name and not replace:
        usage_error(f"there is a context {name!r}; --replace replaces it", "NAME")
    security = SecuritySettings(
        tls=os.path.abspath(ca) if ca else tls,
        user=user or "",
        password="" if user is None else _read_password(user, password_file),
        mechanism=mechanism or "",
        api_key="" if api_key_file is None else _read_password("the API key", api_key_file),
        certificate=os.path.abspath(certificate) if certificate else "",
        key=os.path.abspath(key) if key else "",
    )
    security.tls_context()
    security.credentials()
    by_name = {**contexts.by_name, name: Context(bootstrap_servers, security)}
    store_contexts(Contexts(by_name, contexts.current or name))


@app.command("use")
def use_context(name: NameArgument) -> None:
    """Make a context the current one, whose addresses commands use by default."""
    from mansio.net.contexts import Contexts, store_contexts

    contexts = _with_name(name)
    store_contexts(Contexts(contexts.by_name, name))


@app.command("list")
def list_contexts(output: OutputOption = Output.TABLE) -> None:
    """List the contexts, without passwords."""
    from mansio.net.contexts import load_contexts

    contexts = load_contexts(is_necessary=True)
    current = os.environ.get("MANSIO_CONTEXT") or contexts.current
    rows = [_row(name, one, is_current=name == current) for name, one in sorted(contexts.by_name.items())]
    show_rows(output, rows, COLUMNS, empty="no contexts")


@app.command("remove")
def remove_context(name: NameArgument) -> None:
    """Remove a context, with its password."""
    from mansio.net.contexts import Contexts, store_contexts

    contexts = _with_name(name)
    by_name = {other: one for other, one in contexts.by_name.items() if other != name}
    store_contexts(Contexts(by_name, None if contexts.current == name else contexts.current))


def _with_name(name: str) -> Any:
    """Return the contexts, one of which has this name. Raises `ConfigError`."""
    from mansio.errors import ConfigError
    from mansio.net.contexts import load_contexts

    contexts = load_contexts(is_necessary=True)
    if name not in contexts.by_name:
        known = ", ".join(sorted(contexts.by_name)) or "none"
        raise ConfigError(f"there is no context {name!r}, but {known}")
    return contexts


def _row(name: str, context: Context, *, is_current: bool) -> dict[str, Any]:
    return {
        "current": is_current,
        "name": name,
        "bootstrap_servers": context.bootstrap_servers,
        "protocol": context.security.protocol,
        "user": context.security.user or None,
    }


def _read_password(user: str, file: str | None) -> str:
    """Return the first line of a file, of standard input, or of what is typed on the terminal."""
    from mansio.errors import ConfigError

    if file is None:
        if not sys.stdin.isatty():
            usage_error(
                "there is no terminal to ask for the password: give FILE, or - for standard input",
                "--password-file",
            )
        from getpass import getpass

        return getpass(f"Password of {user}: ")
    if file == STANDARD_INPUT:
        content = sys.stdin.buffer.read(PASSWORD_BYTES_MAX)
    else:
        with open(file, "rb") as source:
            content = source.read(PASSWORD_BYTES_MAX)
    line = content.partition(b"\n")[0].removesuffix(b"\r")
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ConfigError("the password is not UTF-8") from None
