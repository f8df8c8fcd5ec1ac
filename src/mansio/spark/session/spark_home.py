"""Spark's directory without its second copy of PySpark, which every Python worker would compile anew.

Spark puts `SPARK_HOME/python/lib/pyspark.zip` before everything else on the path of each Python worker that it starts.
The zip holds sources only, so each worker compiles what it imports: more than a second of processor time, where the
installed package, which is the same, takes a third of one. So a local session gets a SPARK_HOME of links to all that
the installed one has, but for `python`.

Always true: only PySpark as pip installs it is treated so, and only for workers that run on the Python that has it; a
SPARK_HOME or PYSPARK_PYTHON of the user's own is left as it is.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Final

SPARK_HOME_VARIABLE: Final = "SPARK_HOME"
PYSPARK_PYTHON_VARIABLE: Final = "PYSPARK_PYTHON"
EXCLUDED_ENTRY: Final = "python"
LINKED_HOME_NAME: Final = "mansio-spark-home"


def use_linked_home(directory: str) -> None:
    """Tell Spark, by the environment, which Python its workers run on, and where it lives: in links in `directory`."""
    python = os.environ.setdefault(PYSPARK_PYTHON_VARIABLE, sys.executable)
    installed = _installed()
    if (
        python == sys.executable
        and installed is not None
        and _is_set_by_mansio(os.environ.get(SPARK_HOME_VARIABLE))
    ):
        os.environ[SPARK_HOME_VARIABLE] = create_linked_home(installed, directory)


def create_linked_home(installed: str, directory: str) -> str:
    """Links in a new directory within this one to all of Spark but `python`; where they are."""
    home = os.path.join(directory, LINKED_HOME_NAME)
    os.mkdir(home)
    for name in os.listdir(installed):
        if name != EXCLUDED_ENTRY:
            os.symlink(os.path.join(installed, name), os.path.join(home, name))
    return home


def _is_set_by_mansio(home: str | None) -> bool:
    """Whether nobody else has set it: at most a session did, perhaps of the process that started this one."""
    return home is None or os.path.basename(home) == LINKED_HOME_NAME


def _installed() -> str | None:
    """PySpark's directory, where it brings Spark with it."""
    package = importlib.util.find_spec("pyspark")
    for directory_with_jars in (package.submodule_search_locations or ()) if package else ():
        if os.path.isdir(os.path.join(directory_with_jars, "jars")) and os.path.isdir(
            os.path.join(directory_with_jars, "bin")
        ):
            return directory_with_jars
    return None
