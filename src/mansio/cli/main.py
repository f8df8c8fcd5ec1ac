"""The `mansio` command: registers the subcommands, and converts errors to one line and an exit code.

Exit codes: 0 success, 1 failure (one line on standard error), 2 usage error, 130 interrupted, 143 terminated.

Invariants:
* This module imports only typer and modules that import nothing but typer, so `mansio --help` takes little longer than
  the start of Python; of the commands it builds only the one that runs.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

import mansio_demo
from mansio.cli import mcp, pipeline
from mansio.cli.admin import (
    acl,
    cluster,
    context,
    dlq,
    group,
    quota,
    schedule,
    schema,
    token,
    topic,
    txn,
    user,
    why,
)
from mansio.cli.broker import config, data_check, dev_cluster, doctor, serve
from mansio.cli.records import consume, delayed, produce, trace
from mansio.cli.support.common import print_error
from mansio.errors import MansioError
from mansio.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

VERBOSE_FLAGS = ("-v", "--verbose")
USAGE_ERROR: Final = cast("type[Any]", typer.BadParameter.__base__)
"""Base class of the errors of a command line; typer does not export it, and takes it from click or has a copy of it."""

app = typer.Typer(
    name="mansio",
    help="A durable, distributed message queue with Kafka's protocol and acknowledgement per record.",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich costs 0.1 s, more than everything else in --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("dev-cluster")(dev_cluster.dev_cluster)
app.add_typer(cluster.app, name="cluster")
app.add_typer(topic.app, name="topic")
app.command("produce")(produce.produce)
app.command("consume")(consume.consume)
app.command("trace")(trace.trace)
app.add_typer(group.app, name="group")
app.command("why")(why.why)
app.add_typer(dlq.app, name="dlq")
app.add_typer(delayed.app, name="delayed")
app.add_typer(schedule.app, name="schedule")
app.add_typer(txn.app, name="txn")
app.add_typer(quota.app, name="quota")
app.add_typer(user.app, name="user")
app.add_typer(acl.app, name="acl")
app.add_typer(token.app, name="token")
app.add_typer(schema.app, name="schema")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(config.app, name="config")
app.add_typer(context.app, name="context")
app.add_typer(data_check.app, name="data")
app.command("doctor")(doctor.doctor)
app.command("mcp")(mcp.mcp)
app.add_typer(mansio_demo.app, name="demo")


def _print_version(wanted: bool) -> None:
    if wanted:
        from mansio.cli.support.build_commit import build_commit  # not needed by any command
        from mansio.host.other_distributions import other_distributions, remedy

        commit = build_commit()
        typer.echo(f"mansio {__version__} ({commit})" if commit else f"mansio {__version__}")
        if others := other_distributions():
            typer.echo(f"mansio: {remedy(others)}", err=True)
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print version and commit, and exit."
        ),
    ] = False,
    _verbose: Annotated[
        bool,
        typer.Option(
            *VERBOSE_FLAGS, help="Print the traceback of an error; also at the end of a command line."
        ),
    ] = False,
) -> None:
    pass


def _app_of(words: Sequence[str]) -> typer.Typer:
    """Return the app with the named commands only, or with all if there is none of that name: to build those that are
    not needed takes a tenth of a second."""
    one = copy.copy(app)
    one.registered_commands = [each for each in app.registered_commands if each.name in words]
    one.registered_groups = [each for each in app.registered_groups if each.name in words]
    return one if one.registered_commands or one.registered_groups else app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process, which wants no output
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for the life of the process
    # kio imports hypothesis if it is installed, to register its types; that takes a quarter of a second.
    sys.modules.setdefault("hypothesis", None)  # type: ignore[arg-type]  # with None, importing it raises ImportError
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_verbose = bool(words) and (words[0] in VERBOSE_FLAGS or words[-1] in VERBOSE_FLAGS)
    if words and words[-1] in VERBOSE_FLAGS:
        words.pop()
    try:
        try:
            outcome = _app_of(words[:1])(args=words, prog_name="mansio", standalone_mode=False)
        except (MansioError, OSError):
            if is_verbose:
                import traceback

                traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()  # report write errors here, not in the interpreter's shutdown
    except typer.Abort:  # a prompt was left
        sys.exit(print_error("aborted"))
    except USAGE_ERROR as error:
        sys.exit(_print_usage_error(error))
    except MansioError as error:
        sys.exit(print_error(error.message))
    except OSError as error:
        _discard_output()
        sys.exit(print_error(_os_error_line(error)))
    sys.exit(outcome if isinstance(outcome, int) else 0)


def _print_usage_error(error: Any) -> int:
    """Print an error of the command line as one line that names the command's help; returns the exit code."""
    if type(error).show is not USAGE_ERROR.show:
        error.show()  # a command that needs arguments and has none shows its help
        return int(error.exit_code)
    message = error.format_message().removesuffix(".")
    if error.ctx is not None:
        message += f" (help: {error.ctx.command_path} {error.ctx.help_option_names[0]})"
    print_error(message[:1].lower() + message[1:])
    return int(error.exit_code)


def _discard_output() -> None:
    """Discard output that could not be written. Otherwise the interpreter would write it again at exit and print a
    traceback.
    """
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _os_error_line(error: OSError) -> str:
    if error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return error.strerror or str(error)


if __name__ == "__main__":
    main()
