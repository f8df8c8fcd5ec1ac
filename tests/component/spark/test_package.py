"""Imports of the Spark packages: `pyspark_mansio`, which Spark imports in every process, imports little, and
`mansio.spark` can be imported without Spark."""

from __future__ import annotations

import subprocess
import sys


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh process has loaded after a statement."""
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_needs_no_spark_and_gives_its_jobs_when_they_are_named() -> None:
    light = loaded_by("import mansio.spark")
    assert not light & {"pyspark", "pyarrow", "numpy", "pyiceberg", "asyncio"}
    names = "from mansio.spark import archive, read_topic_as_table, replay, session"
    check = "assert all(map(callable, (archive, read_topic_as_table, replay, session)))"
    assert "mansio.pipelines.archive" in loaded_by(f"{names}; {check}")


def test_spark_finds_the_source_and_its_import_is_light() -> None:
    """An import that fails or is slow here would hit every Python source of the user."""
    loaded = loaded_by("import pyspark_mansio; assert pyspark_mansio.DefaultSource.name() == 'mansio'")
    ours = {name for name in loaded if name.startswith("mansio.")}
    assert ours <= {
        "mansio.errors",
        "mansio.host",
        "mansio.host.extras",
        "mansio.host.platforms",
        "mansio.spark",
        "mansio.spark.session",
        "mansio.spark.session.addresses",
        "mansio.spark.session.java",
        "mansio.spark.session.temp_dirs",
        "mansio.spark.data_source",
        "mansio.spark.planned_source",
        "mansio.iceberg",
        "mansio.iceberg.errors",
        "mansio.schemas",
        "mansio.serde",
        "mansio.serde.errors",
        "mansio.version",
    }
