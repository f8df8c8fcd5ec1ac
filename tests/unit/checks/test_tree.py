"""The tree itself: nothing of the machine it was written on, one version, generated documents up to date."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version
from tools import features

import mansio
from support.machine import scaled
from support.paths import ROOT

TEXT_BYTES_MAX = 1 << 20

FOREIGN = {
    "a path of somebody's machine": re.compile(r"(?<![\w.~>}-])/(?:home|root|work|Users)/\w"),
    "a package registry": re.compile(r"(extra-)?index-url\b|--find-links\b|https?://[^\s\"')]+/simple\b"),
    "a neighbour of the checkout": re.compile(r"\.\./shared\b"),
}

OVER_SOCKETS = ("component", "system", "nightly")
"""Directories of tests that talk to a broker through a real connection; only they may claim a row."""


def tracked() -> list[Path]:
    """Every file of the project: what git knows or would add; all files in an unpacked source distribution."""
    if not (ROOT / ".git").exists():
        return [path for path in ROOT.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=scaled(60),
    )
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and path != Path(__file__).resolve()]


def foreign_lines(text: str) -> list[str]:
    checkout = str(ROOT)
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        found += [
            f"{number}: {what}: {line.strip()[:80]}" for what, one in FOREIGN.items() if one.search(line)
        ]
        if re.search(re.escape(checkout) + r"\b", line):
            found.append(f"{number}: the path of this checkout")
    return found


def test_no_file_names_this_machine_or_a_registry() -> None:
    found = []
    for path in tracked():
        content = path.read_bytes()
        if len(content) <= TEXT_BYTES_MAX and b"\0" not in content:
            lines = foreign_lines(content.decode(errors="replace"))
            found += [f"{path.relative_to(ROOT)}:{line}" for line in lines]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["data: /home/somebody/x", "--index-url=https://mirror/simple", "see ../shared/notes", f"cd {ROOT}"],
)
def test_the_search_for_foreign_lines_finds_them(line: str) -> None:
    assert foreign_lines(line)


def test_the_version_is_written_once() -> None:
    version = mansio.__version__
    assert importlib.metadata.version("mansio-mq") == version
    written = re.compile(rf"(?<![\d.]){re.escape(version)}(?![\d.])")
    sources = [path for path in tracked() if path.suffix in {".py", ".toml", ".yaml"}]
    holders = [path.relative_to(ROOT) for path in sources if written.search(path.read_text())]
    assert holders == [Path("src/mansio/version.py")]


def test_the_changelog_names_the_version() -> None:
    """A release has a section of its own; what a development version has is in "Unreleased"."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    title = "Unreleased\n" if ".dev" in mansio.__version__ else f"{mansio.__version__} - 20"
    assert f"\n## {title}" in changelog


def test_the_version_is_later_than_every_release() -> None:
    """Otherwise pip takes an installed release for this version, and keeps its code."""
    released = (ROOT / "tests" / "fixtures" / "wheels").glob("mansio*.whl")
    versions = [Version(wheel.name.split("-")[1]) for wheel in released]
    tags = subprocess.run(
        ["git", "tag", "--list", "v*"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    is_tagged = f"v{mansio.__version__}" in tags.stdout.split()
    assert Version(mansio.__version__) > max(versions) or is_tagged


def test_every_module_states_its_purpose() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "src").rglob("*.py")
        if (text := path.read_text().strip())
        and not text.startswith('"""')
        and ast.get_docstring(ast.parse(text)) is None
    ]
    assert silent == []


def test_marked_rows_exist_and_are_shown_over_a_real_connection() -> None:
    marks = features.marks()
    unknown = {row for mark in marks for row in mark.rows} - features.known_rows()
    assert unknown == set()
    elsewhere = {
        f"{mark.file.relative_to(ROOT)}::{mark.test}"
        for mark in marks
        if mark.file.relative_to(features.TESTS).parts[0] not in OVER_SOCKETS
    }
    assert elsewhere == set(), f"rows may be claimed in {', '.join(OVER_SOCKETS)} only"


def test_every_row_has_a_case_in_make_test() -> None:
    assert features.without_smoke_case(features.marks()) == set()


def test_row_of_tests_that_make_test_leaves_out_is_found(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.row('L1')\n"
        "def test_a(): ...\n"
        "@pytest.mark.full\n"
        "@pytest.mark.row('L2')\n"
        "def test_b(): ...\n"
        "@pytest.mark.full\n"
        "class TestC:\n"
        "    @pytest.mark.row('L3')\n"
        "    def test_c(self): ...\n"
    )
    (tmp_path / "test_y.py").write_text(
        "import pytest\npytestmark = [pytest.mark.full, pytest.mark.row('L1', 'L4')]\ndef test_d(): ...\n"
    )
    (tmp_path / "nightly").mkdir()
    (tmp_path / "nightly" / "test_z.py").write_text(
        "import pytest\n@pytest.mark.row('L5')\ndef test_e(): ...\n"
    )
    assert features.without_smoke_case(features.marks(tmp_path)) == {"L2", "L3", "L4", "L5"}


def test_row_marks_are_read_from_functions_classes_and_modules(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "pytestmark = [pytest.mark.row('L1')]\n"
        "@pytest.mark.row('L2', 'L3')\n"
        "def test_a(): ...\n"
        "@pytest.mark.row('L4')\n"
        "class TestB:\n"
        "    async def test_b(self): ...\n"
    )
    found = {mark.test: mark.rows for mark in features.marks(tmp_path)}
    assert found == {"test_a": ("L1", "L2", "L3"), "test_b": ("L1", "L4")}
