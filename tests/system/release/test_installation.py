"""The wheel works where nothing but its dependencies is, and has what it should have."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from typing import TYPE_CHECKING

import pytest
from tools import install_lines

import mansio
from mansio.host.extras import EXTRAS
from support.environments import Environment, run
from support.paths import ROOT
from support.smoke import check_installation

if TYPE_CHECKING:
    from pathlib import Path

    from support.environments import Distributions

TOP_LEVEL = {"mansio", "mansio_demo", "pyspark_mansio", "DIST-INFO"}


@pytest.mark.full
@pytest.mark.timeout(180)
def test_wheel_serves_publishes_and_receives_outside_the_repository(
    tmp_path: Path, distributions: Distributions
) -> None:
    environment = Environment(tmp_path)
    environment.use_packages_of_this_interpreter()
    environment.pip("install", "--quiet", "--no-deps", "--no-index", distributions.wheel)
    check_installation(environment)
    blocked = sorted({module for modules in EXTRAS.values() for module in modules})
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
    code += "import mansio, mansio.spark; print(len([getattr(mansio, name) for name in mansio.__all__]))"
    assert int(environment.run("python", "-c", code)) == len(mansio.__all__)


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", ["README.md", "docs/tutorial/quickstart.md"])
def test_the_install_lines_for_a_package_index_find_the_distribution_by_name(
    tmp_path: Path, distributions: Distributions, page: str
) -> None:
    """A folder of wheels stands for the index; the dependencies are those of the test run."""
    copy = tmp_path / page
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text((ROOT / page).read_text())
    (tmp_path / "docs").mkdir(exist_ok=True)
    if page != "README.md":
        (tmp_path / "README.md").touch()
    install_lines.switch(tmp_path)
    blocks = re.findall(r"```sh\n(.*?)```", copy.read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "pip install 'mansio-mq'\n" in block)
    place = tmp_path / "elsewhere"
    place.mkdir()
    variables = {
        "PIP_FIND_LINKS": str(distributions.wheel.parent),
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "HOME": str(place),
        "PYTHONPATH": "",
    }
    version = f"PYTHONPATH='{sysconfig.get_path('purelib')}' mansio --version"
    output = run(["sh", "-ec", f"{block}\n{version}"], place=place, environment=variables, seconds=120)
    assert mansio.__version__ in output.splitlines()[-1]
    assert list(place.glob(".venv/lib/python*/site-packages/mansio/__init__.py"))


@pytest.mark.full
def test_wheel_contains_the_packages_and_nothing_else(distributions: Distributions) -> None:
    names = zipfile.ZipFile(distributions.wheel).namelist()
    version = f"mansio_mq-{mansio.__version__}.dist-info"
    assert {name.partition("/")[0].replace(version, "DIST-INFO") for name in names} == TOP_LEVEL
    assert {f"{version}/licenses/LICENSE", f"{version}/licenses/NOTICE", "mansio/py.typed"} <= set(names)
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    sources = {name.removeprefix("src/") for name in listed if (ROOT / name).exists()}
    assert {name for name in names if not name.startswith(version)} == sources | {"mansio/commit.txt"}


@pytest.mark.full
def test_two_builds_of_one_commit_have_the_same_bytes(tmp_path: Path, distributions: Distributions) -> None:
    again = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(ROOT)],
        env={"SOURCE_DATE_EPOCH": _commit_time(), "PATH": "/usr/bin:/bin", "TZ": "Asia/Tokyo"},
        capture_output=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr.decode()
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.read_bytes() == distributions.wheel.read_bytes()


def test_building_needs_the_build_tools_only(tmp_path: Path) -> None:
    command = ["make", "--dry-run", "--no-print-directory", "dist", f"VENV={tmp_path / 'venv'}"]
    planned = subprocess.check_output(command, cwd=ROOT, text=True)
    installed = [line for line in planned.splitlines() if " install " in line]
    assert [line.partition(" install ")[2].split()[-1] for line in installed] == ["pip", "build"]


def _commit_time() -> str:
    return subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True).strip()
