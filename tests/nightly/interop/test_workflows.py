"""The workflows, checked by actionlint, which is a program in Go: no wheel contains it."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Final

import pytest

from support.machine import scaled
from support.paths import ROOT

ACTIONLINT: Final = "github.com/rhysd/actionlint/cmd/actionlint@v1.7.12"
BUILD_DEADLINE_S: Final = 600


@pytest.mark.timeout(900)
def test_actionlint_finds_nothing_in_the_workflows() -> None:
    if shutil.which("go") is None:
        pytest.skip("go missing: install Go")
    environment = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
    found = subprocess.run(
        [
            "go",
            "run",
            ACTIONLINT,
            "-shellcheck=",
            "-pyflakes=",
            *sorted((ROOT / ".github/workflows").iterdir()),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled(BUILD_DEADLINE_S),
    )
    assert found.returncode == 0, found.stdout + found.stderr
