"""`mansio pipeline`: the jobs on Spark, and what belongs to them.

Each job is a module `mansio.cli.pipeline_<job>` with a function `register(app)` that adds its command. Always true: the
modules are imported when somebody asks for a job or for the list of them, not for `mansio --help`; none of them imports
Spark before its command runs.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import mansio.cli

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODULE_PREFIX = "pipeline_"
SAFE_PATH = "PYTHONSAFEPATH"

MasterOption = Annotated[
    str | None,
    typer.Option(
        "--master",
        envvar="MANSIO_SPARK_MASTER",
        metavar="URL",
        help="Where Spark runs: local[*] (this machine, the default), spark://..., k8s://..., yarn.",
    ),
]


def start_session(master: str | None, name: str, **settings: str) -> SparkSession:
    """A session for a command. Spark's Python workers import nothing from the directory that the command was given in:
    a file there called `random.py`, the user's own pipeline perhaps, would take the place of Python's and end them."""
    from mansio.spark.session import session

    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        return session(master, name, **settings)
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


class LazyCommandGroup(TyperGroup):
    """A command group whose commands are looked up at the first use."""

    _loaded: dict[str, Any] | None = None

    @property
    def commands(self) -> MutableMapping[str, Any]:
        """Command by name, all jobs imported."""
        if self._loaded is None:
            self._loaded = dict(typer.main.get_group(load_commands()).commands)
        return self._loaded

    @commands.setter
    def commands(self, _given: MutableMapping[str, Any]) -> None:
        """There are none beside the jobs."""


def load_commands() -> typer.Typer:
    """All jobs as commands of one app."""
    found = typer.Typer(rich_markup_mode=None)
    found.callback()(command_group)
    for module in sorted(pkgutil.iter_modules(mansio.cli.__path__), key=lambda module: module.name):
        if module.name.startswith(MODULE_PREFIX):
            importlib.import_module(f"mansio.cli.{module.name}").register(found)
    return found


app = typer.Typer(cls=LazyCommandGroup, no_args_is_help=True, help="Run data pipelines on Spark.")


@app.callback()
def command_group() -> None:
    """Run data pipelines on Spark."""
