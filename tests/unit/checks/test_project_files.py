"""Files for programs outside the project: Renovate, pre-commit, templates. They agree with the project's own."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from typing import TYPE_CHECKING

import pytest
import yaml
from packaging.requirements import Requirement
from tools import coverage_figure

from support.machine import scaled
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAKE_TARGET = re.compile(r"`make ([a-z-]+)")


def requirements() -> Iterator[Requirement]:
    """Every requirement in pyproject.toml."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [
        content["project"]["dependencies"],
        *content["project"]["optional-dependencies"].values(),
        *content["dependency-groups"].values(),
    ]
    for group in groups:
        yield from (Requirement(line) for line in group if isinstance(line, str))


def test_renovate_reads_the_constraints_and_keeps_the_bounds_of_the_project() -> None:
    settings = json.loads((ROOT / ".github/renovate.json").read_text())
    (pattern,) = settings["pip_requirements"]["managerFilePatterns"]
    read = [path.name for path in ROOT.glob("*.txt") if re.search(pattern.strip("/"), path.name)]
    assert read == ["constraints.txt"]
    bounds = {
        (one.name, str(each)) for one in requirements() for each in one.specifier if each.operator == "<"
    }
    allowed = {
        (name, rule["allowedVersions"])
        for rule in settings["packageRules"]
        if "allowedVersions" in rule
        for name in rule["matchPackageNames"]
    }
    assert allowed == bounds


def test_hooks_of_pre_commit_are_programs_of_the_project_and_download_nothing() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    programs = {hook["entry"].split()[0] for hook in repository["hooks"]}
    assert programs == {".venv/bin/ruff", "tools/hooks/commit-msg"}
    assert (ROOT / "tools/hooks/commit-msg").exists()
    assert "$(BIN)/ruff" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("text", ["import os\n", "x = [ 1 ]\n"], ids=["check", "format"])
def test_a_hook_of_pre_commit_refuses_a_file_that_lint_would_refuse(tmp_path: Path, text: str) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(text)
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"].split() for hook in repository["hooks"] if "ruff" in hook["entry"]]
    if not (ROOT / entries[0][0]).exists():
        pytest.skip("no .venv: `make setup` makes it")
    codes = {
        path: [
            subprocess.run([*entry, path], cwd=ROOT, capture_output=True, timeout=scaled(60)).returncode
            for entry in entries
        ]
        for path in (bad, ROOT / "hatch_build.py")
    }
    assert any(codes[bad])
    assert not any(codes[ROOT / "hatch_build.py"])


def test_pages_for_contributors_name_targets_of_the_makefile() -> None:
    (names,) = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = set(names.replace("\\\n", "").split())
    pages = [
        ROOT / "CONTRIBUTING.md",
        ROOT / "docs/internals/releasing.md",
        *(ROOT / ".github").rglob("*.md"),
    ]
    for page in pages:
        assert set(MAKE_TARGET.findall(page.read_text())) <= targets, page


def test_the_figure_of_coverage_is_that_of_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    totals = {"num_statements": 2000, "covered_lines": 1500, "num_branches": 300, "covered_branches": 100}
    report.write_text(json.dumps({"totals": {**totals, "percent_covered": 70.0}}))
    counts = coverage_figure.figure(report)
    assert counts == totals
    assert coverage_figure.sentence(counts) == (
        "Last run: **75 %** of 2,000 statements, **33 %** of 300 branches."
    )
    assert coverage_figure.sentence(None) == "Not measured yet."
