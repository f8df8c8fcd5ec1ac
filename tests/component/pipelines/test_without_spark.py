"""What needs no Spark does not import pyspark, and `mansio.spark` has the names that type checkers find in it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mansio

BLOCKED = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Blocked())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
SOURCE = Path(mansio.__file__).parent
JOBS = ("erase", "lag", "maintain", "replay", "mirroring.mirror", "pipeline_metrics", "schema_compatibility")


def modules_of(package: str) -> list[str]:
    """All modules of a package, by name."""
    paths = sorted((SOURCE / package).rglob("*.py"))
    return [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in paths]


@pytest.mark.parametrize(
    "names",
    [modules_of("iceberg"), modules_of("schemas"), [f"mansio.pipelines.{job}" for job in JOBS]],
    ids=["iceberg", "schemas", "pipelines"],
)
def test_what_needs_no_spark_can_be_imported_without_it(names: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_block_of_this_test_is_effective() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, "mansio.pipelines.compact"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'pyspark" in done.stderr


def test_type_checkers_find_each_name_of_the_spark_package_where_it_is_defined() -> None:
    import mansio.spark

    stub = ast.parse((SOURCE / "spark/__init__.pyi").read_text())
    origins = {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(origins) == sorted(mansio.spark.__all__)
    lazy: dict[str, tuple[str, str]] = vars(mansio.spark)["_LAZY"]
    assert {name: module for name, (_, module) in lazy.items()} == {name: origins[name] for name in lazy}
