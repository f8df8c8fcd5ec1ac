"""`mansio pipeline`: Spark jobs and the commands that belong to them.

Each module of this package adds its commands by `register(app)`.

Invariants:
* The modules are imported for `mansio pipeline`, not for other commands or `mansio --help`.
* No module imports Spark before its command runs.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import warnings
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from mansio.cli.support.common import parse_name_values, print_error, usage_error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mansio.spark.cluster.problems import SharedDirectory

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"

MasterOption = Annotated[
    str | None,
    typer.Option(
        "--master",
        envvar="MANSIO_SPARK_MASTER",
        metavar="URL",
        help="Spark master: local[*] (this machine, the default), spark://..., k8s://..., yarn.",
    ),
]


RemoteOption = Annotated[
    str | None,
    typer.Option(
        "--remote",
        envvar="SPARK_REMOTE",
        metavar="URL",
        help="Spark Connect server, such as sc://host:15002, instead of a master.",
    ),
]
ConfOption = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="NAME=VALUE", help="Settings of Spark; repeatable."),
]
SkipCheckOption = Annotated[
    bool,
    typer.Option(
        "--skip-check",
        help="Start without the check of the cluster (Python, packages, brokers, directories).",
    ),
]


def start_session(
    master: str | None,
    name: str,
    *,
    remote: str | None = None,
    bootstrap_servers: str | None = None,
    directories: Sequence[SharedDirectory] = (),
    skip_check: bool = False,
    conf: Sequence[str] | None = None,
) -> SparkSession:
    """Return a Spark session for a command. Raises `ConnectionLost` before Spark starts if no broker answers. On a
    cluster, brokers and shared directories are checked on every worker; each problem is printed as one line, and the
    exit code is 1.

    Sets PYTHONSAFEPATH, so that Spark's Python workers import nothing from the current directory: a file `random.py`
    there would shadow Python's module.
    """
    from mansio.spark.session import session
    from mansio.spark.sync_client import sync_client

    if master is not None and remote is not None:
        usage_error(f"give one of them: the master is {master}, the server {remote}", "--master / --remote")
    if bootstrap_servers is not None:
        sync_client(bootstrap_servers)
    before = os.environ.get(SAFE_PATH_VARIABLE)
    os.environ[SAFE_PATH_VARIABLE] = "1"
    try:
        spark = session(master, name, remote=remote, **dict(parse_name_values(conf or (), "--conf")))
    finally:
        if before is None:
            del os.environ[SAFE_PATH_VARIABLE]
        else:
            os.environ[SAFE_PATH_VARIABLE] = before
    # The command says itself, in one line, that a server of Spark Connect has ended.
    warnings.filterwarnings("ignore", message="StreamingQueryListenerBus Handler thread")
    if not skip_check:
        _require_cluster(spark, bootstrap_servers, directories)
    return spark


def _require_cluster(
    spark: SparkSession, bootstrap_servers: str | None, directories: Sequence[SharedDirectory]
) -> None:
    from mansio.pipelines.cluster_check import require_cluster
    from mansio.spark.cluster.problems import ClusterNotReady
    from mansio.spark.session.addresses import is_remote

    if not is_remote(spark):
        return
    if sys.stderr.isatty():
        print("checking the cluster", file=sys.stderr, flush=True)
    try:
        require_cluster(spark, bootstrap_servers, directories)
    except ClusterNotReady as error:
        for problem in error.problems:
            print_error(problem.line)
        raise typer.Exit(1) from None


class LazyCommandGroup(TyperGroup):
    """Command group that imports its commands at the first use."""

    _loaded: dict[str, Any] | None = None

    @property
    def commands(self) -> MutableMapping[str, Any]:
        """The commands of `mansio pipeline` by name; the first access imports all modules of this package."""
        if self._loaded is None:
            self._loaded = dict(typer.main.get_group(load_commands()).commands)
        return self._loaded

    @commands.setter
    def commands(self, _commands: MutableMapping[str, Any]) -> None:
        """Do nothing: the commands are defined by the modules of this package."""


def load_commands() -> typer.Typer:
    """Import all modules of this package and register their commands in one app."""
    found = typer.Typer(rich_markup_mode=None)
    found.callback()(command_group)
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        importlib.import_module(f"{__name__}.{module.name}").register(found)
    return found


app = typer.Typer(cls=LazyCommandGroup, no_args_is_help=True, help="Run data pipelines on Spark.")


@app.callback()
def command_group(context: typer.Context) -> None:
    """Run data pipelines on Spark."""
    from mansio.cli.support.warning_lines import show_warnings
    from mansio.telemetry.jobs import job_span

    show_warnings()
    context.with_resource(job_span(f"pipeline {context.invoked_subcommand}"))
