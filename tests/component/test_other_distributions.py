"""Another distribution with files in the package is reported, with the commands that repair it."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING

import pytest

from mansio.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path


def installed(folder: Path, name: str, files: str) -> Path:
    """A folder with an installed distribution."""
    info = folder / f"{name}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "RECORD").write_text(files)
    return folder


@pytest.mark.row("A9")
def test_version_and_doctor_warn_of_another_distribution_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def output_of(*arguments: str) -> tuple[str, str]:
        with pytest.raises(SystemExit):
            main(list(arguments))
        return capsys.readouterr()

    installed(tmp_path, "harmless", "harmless/mansio/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert output_of("--version")[1] == ""
    installed(tmp_path, "mansio", "mansio-0.1.0.dist-info/METADATA,,\nmansio/__init__.py,,\n")
    importlib.invalidate_caches()
    line = (
        "mansio 0.1.0 has files in the package mansio, too: run `pip uninstall mansio mansio-mq`, then"
        " install mansio-mq again"
    )
    version, warning = output_of("--version")
    assert version.startswith("mansio ")
    assert line in warning
    checks = json.loads(output_of("doctor", "--output", "json", "--data", str(tmp_path))[0])
    (package,) = (each for each in checks if each["name"] == "package")
    assert (package["status"], package["detail"]) == ("problem", line)
