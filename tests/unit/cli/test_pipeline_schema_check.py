"""`mansio pipeline schema-check DIR` in a build: it fails when a version breaks something, and reports what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mansio.cli.pipeline import schema_check

SCHEMAS = Path(__file__).parents[1] / "pipelines" / "schemas"


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.callback()(lambda: None)
    schema_check.register(app)
    result = CliRunner().invoke(app, ["schema-check", *arguments])
    return result.exit_code, result.output


def test_each_version_is_compared_with_the_one_before_and_the_exit_code_shows_whether_anything_breaks(
    tmp_path: Path,
) -> None:
    code, output = run(str(SCHEMAS), "-o", "json")
    assert code == 1
    assert {(one["from"], one["to"]) for one in json.loads(output)} == {("v2", "v3"), ("v3", "v4")}
    for number in (9, 10):  # which would be the other way round by their letters
        (tmp_path / f"v{number}.json").write_text((SCHEMAS / f"v{number - 8}.json").read_text())
    assert run(str(tmp_path), "-o", "json") == (0, "[]\n")


@pytest.mark.parametrize("content", ["{", '{"a": '])
def test_what_is_not_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "v1.json").write_text("{}")
    (tmp_path / "v2.json").write_text(content)
    app = typer.Typer()
    app.callback()(lambda: None)
    schema_check.register(app)
    result = CliRunner().invoke(app, ["schema-check", str(tmp_path)])
    assert "v2.json cannot be read" in str(result.exception)
    assert run(str(tmp_path / "none"))[0] == 2
