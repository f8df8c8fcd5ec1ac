"""What `mansio pipeline run` prints and with which code it ends, for a run whose result is given. Without a JVM."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner, Result

from mansio.cli.main import app
from mansio.cli.pipeline import run as command
from mansio.pipelines import run as job
from mansio.pipelines.run import PipelineJob, PipelineResult

if TYPE_CHECKING:
    from pathlib import Path


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_rows: int, *options: str) -> Result:
    file = tmp_path / "mine.py"
    file.write_text("def transform(frame):\n    return frame\n")

    def finished(_spark: Any, wanted: PipelineJob, *_given: Any) -> PipelineResult:
        return PipelineResult(wanted.name, wanted.target, 2, 50, 0, late_rows=late_rows)

    monkeypatch.setattr(command, "start_session", lambda *_given, **_named: None)
    monkeypatch.setattr(job, "run_pipeline", finished)
    arguments = ["pipeline", "run", str(file), "--topic", "t", "--to", "out", "--once", *options]
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    ("late_rows", "options", "code"), [(0, (), 0), (0, ("--strict",), 0), (3, (), 0), (3, ("--strict",), 1)]
)
def test_late_rows_are_a_line_at_the_end_and_an_exit_code_with_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_rows: int, options: tuple[str, ...], code: int
) -> None:
    done = run(tmp_path, monkeypatch, late_rows, *options)
    assert done.exit_code == code, done.output
    line = "mine: dropped 3 late rows: older than the watermark when read"
    assert (line in done.stderr) is (late_rows > 0)
    assert "mine: 50 records in 2 batches, into topic out, 0 behind" in done.stdout


def test_late_rows_are_in_the_json_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(tmp_path, monkeypatch, 3, "--output", "json")
    assert json.loads(done.stdout)["late_rows"] == 3
