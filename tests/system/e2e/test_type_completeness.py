"""Types of the public API, as pyright sees them in a program that has installed the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tools import public_api

from support.machine import scaled
from support.paths import ROOT, required_package

FACADE = "public_names"


def environment_with_package(directory: Path) -> Path:
    """A virtual environment with the packages of this one, and with the source as an installed package: pyright does
    not follow the link of an editable installation."""
    (directory / "bin").mkdir()
    for name in ("python", "python3"):
        (directory / "bin" / name).symlink_to(Path(sys.executable).resolve())
    (directory / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    installed = Path(sysconfig.get_path("purelib"))
    packages = directory / installed.relative_to(sys.prefix)
    packages.mkdir(parents=True)
    for package in installed.iterdir():
        if package.suffix != ".pth" and not package.name.startswith("mansio"):
            (packages / package.name).symlink_to(package)
    copied = packages / "mansio"
    copied.mkdir()
    for path in (ROOT / "src/mansio").iterdir():
        (copied / path.name).symlink_to(path)
    (copied / f"{FACADE}.py").write_text(facade())
    return directory


def facade() -> str:
    """A module that exports the public names of all modules and nothing else."""
    names = [
        (module_name, name, f"{module_name.replace('.', '_')}_{name}")
        for module_name in public_api.MODULES
        for name in public_api.public_objects(module_name)
    ]
    imports = [f"from {module_name} import {name} as {alias}\n" for module_name, name, alias in names]
    return "".join(imports) + f"__all__ = {json.dumps([alias for _, _, alias in names])}\n"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_types_of_the_public_api_and_of_all_that_it_refers_to_are_complete(tmp_path: Path) -> None:
    required_package("pyright")
    home = environment_with_package(tmp_path)
    environment = os.environ | {
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(home),
        "PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT": "1",
        "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
    }
    command = [sys.executable, "-m", "pyright", "--ignoreexternal", "--outputjson"]
    outcome = subprocess.run(
        [*command, "--verifytypes", f"mansio.{FACADE}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled(200),
        check=False,
    )
    report = json.loads(outcome.stdout)["typeCompleteness"]
    incomplete = {
        symbol["name"]: [diagnostic["message"] for diagnostic in symbol["diagnostics"]]
        for symbol in report["symbols"]
        if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]
    }
    causes = {
        name: messages
        for name, messages in incomplete.items()
        if any("partially unknown" not in message for message in messages)
    }
    assert causes == {}
    assert incomplete == {}
    names = sum(len(public_api.public_objects(module_name)) for module_name in public_api.MODULES)
    assert report["exportedSymbolCounts"]["withKnownType"] >= names
    assert report["completenessScore"] == 1
