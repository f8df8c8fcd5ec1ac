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
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


def start_session(master: str | None, name: str, **settings: str) -> SparkSession:
    """A Spark session for a command.

    Sets PYTHONSAFEPATH, so that Spark's Python workers import nothing from the current directory: a file `random.py`
    there would shadow Python's module.
    """
    from mansio.spark.session import session

    before = os.environ.get(SAFE_PATH_VARIABLE)
    os.environ[SAFE_PATH_VARIABLE] = "1"
    try:
        return session(master, name, **settings)
    finally:
        if before is None:
            del os.environ[SAFE_PATH_VARIABLE]
        else:
            os.environ[SAFE_PATH_VARIABLE] = before


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
def command_group() -> None:
    """Run data pipelines on Spark."""
