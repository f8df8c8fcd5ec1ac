"""docs/tutorial/first-pipeline.md, run as it stands and in its order.

Blocks that use Spark run in this process, where the session of these tests is found and used: a session for each would
cost half a minute.
"""

from __future__ import annotations

import io
import shlex
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from mansio.cli.main import app
from support.documents import Example, examples
from system.e2e.test_examples import Bench, Outcome, started
from system.spark.test_pipelines_document import execute, handlers

if TYPE_CHECKING:
    from pathlib import Path


PAGE = "docs/tutorial/first-pipeline.md"
HERE = ("mansio pipeline ", "python ")

__all__ = ["handlers"]


class SparkBench(Bench):
    """A bench that runs pipelines and Python files in this process."""

    def run(self, example: Example) -> Outcome:
        lines = self.code(example).splitlines()
        if example.name.endswith(".py") or not all(line.startswith(HERE) for line in lines):
            return super().run(example)
        printed = io.StringIO()
        for line in lines:
            program, *words = shlex.split(line)
            if program == "mansio":
                done = CliRunner().invoke(app, words)
                if done.exit_code:
                    return Outcome(done.exit_code, done.output)
                printed.write(done.stdout)
            else:
                with redirect_stdout(printed):
                    execute((self.directory / words[0]).read_text())
        return Outcome(0, printed.getvalue())


@pytest.mark.full
@pytest.mark.usefixtures("handlers", "spark")
def test_the_tutorial_about_a_pipeline_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with started(tmp_path, PAGE, SparkBench) as bench:
        monkeypatch.setenv("MANSIO_BOOTSTRAP_SERVERS", bench.bootstrap_servers)
        # Spark's own processes were started in another directory.
        bench.addresses["--warehouse lake"] = f"--warehouse {tmp_path}/lake"
        bench.addresses['"lake"'] = f'"{tmp_path}/lake"'
        bench.follow(examples(PAGE))
