"""docs/reference/cli.md, generated from the commands: `python -m tools.command_reference > docs/reference/cli.md`.

A test compares the file with the output of this module.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 100

PREFACE = """\
# The `mansio` command

Generated from the commands by `python -m tools.command_reference`; a test keeps it current.

* **Where the broker is**: `--bootstrap-servers HOST:PORT` or `MANSIO_BOOTSTRAP_SERVERS`, on every command that is
  a client; otherwise the current context of `mansio context`. TLS, user and password come from `MANSIO_TLS`,
  `MANSIO_USER`, `MANSIO_PASSWORD`, or from the context for these addresses; they are no options.
* **What is printed**: results go to standard output, everything else to standard error. `--output json` (or
  `MANSIO_OUTPUT=json`) prints one JSON value. `produce` and `consume` print one per line, and ignore
  `MANSIO_OUTPUT`. If standard output is not a terminal, tables are plain text, one row per line, not truncated.
* **Exit codes**: 0 done; 1 it failed, with one line on standard error; 2 the command line was wrong; 130 Ctrl-C,
  143 SIGTERM: both let a consumer commit and leave its group first.
* **Times** (`--from-time`, `--to-time`, `--to`, `--before`): `2013-11-21T10:30:00Z` (without a zone: local time),
  `-15m`, `-2h`, `-3d`, `now`, or milliseconds since the epoch; where an offset is also possible (`--to`,
  `--before`), with an `@` before them: `@1384992000000`.
* **Separators** (`--delimiter`, `--key-separator`): `\\n`, `\\t`, `\\0`, `\\xNN` are escape sequences as in C.
"""


def reference() -> str:
    """The whole page."""
    from mansio.cli.main import app

    parts = [
        f"## `{context.command_path}`\n\n```text\n{_help(context)}\n```\n"
        for context in _commands(typer.main.get_command(app), "mansio", None)
    ]
    return "\n".join([PREFACE, *parts])


def _commands(command: Any, name: str, parent: Any) -> Iterator[Any]:
    """The context of each command, parents first; typer's own types are not public, hence Any."""
    context = command.context_class(
        command,
        info_name=name,
        parent=parent,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        **command.context_settings,
    )
    yield context
    for child_name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, child_name, context)


def _help(context: Any) -> str:
    lines = inspect.cleandoc(context.get_help()).splitlines()
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    print(reference(), end="")
