"""The release tool refuses, with the reason, while a step is missing, and tags what it has built twice."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
from typing import TYPE_CHECKING

import pytest
from tools import install_lines, owner, release

from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OWNER = """name = "Some Person"
email = "person@mail.example"
repository = "https://git.example/mansio"
documentation = "https://docs.example/mansio"
security_contact = "safety@mail.example"
"""
FILES = {
    "src/mansio/version.py": '__version__ = "1.2.0"\n',
    "tools/owner.toml": OWNER,
    "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n## 1.2.0 - 2030-01-31\n\n* More.\n",
    "docs/internals/releasing.md": "| Mansio | writes |\n|---|---|\n| 1.2.0 | 3 |\n",
    "docs/reference/performance.md": "Figures of 1.2.0.\n",
    "README.md": "`pip install 'mansio-mq'`\n",
    "NOTICE": "Required:\n  one   MIT\n  two   MIT\n",
    "pyproject.toml": '[project]\nname = "mansio-mq"\ndependencies = ["one>=1"]\n'
    '[project.optional-dependencies]\nall = ["mansio-mq[x]"]\nx = ["two[y]>=2; python_version > \'3\'"]\n',
    ".gitignore": "dist/\n.release/\n",
    # Stands for the build: a wheel with the time of the last commit in it, as the real one.
    "tools/dist.sh": "#!/bin/sh\nset -e\nmkdir -p $1\ncp content.whl $1/mansio_mq-1.2.0-py3-none-any.whl\n"
    "echo source >$1/mansio_mq-1.2.0.tar.gz\n",
}


class Checkout:
    """A small repository in which every step is done."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in FILES.items():
            self.write(name, text)
        (root / "tools/dist.sh").chmod(0o755)
        wheel(root / "content.whl", {"mansio/a.py": "a", "mansio/commit.txt": "later"})
        kept = root / "tests/fixtures/wheels/mansio_mq-1.2.0-py3-none-any.whl"
        kept.parent.mkdir(parents=True)
        wheel(kept, {"mansio/a.py": "a", "mansio/commit.txt": "earlier"})
        self.git("init", "--quiet")
        self.git("config", "user.name", "test")
        self.git("config", "user.email", "test@mail.example")
        self.commit()
        self.record_runs()

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def replace(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "Change")

    def git(self, *arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=self.root, check=True, capture_output=True, text=True
        ).stdout.strip()

    def record_runs(self) -> None:
        """As if all runs had passed at this commit."""
        head = self.git("rev-parse", "HEAD")
        names = ",".join(f'"{name}": "{head}"' for name in release.RUNS)
        self.write(".release/passed.json", f"{{{names}}}")

    def missing(self) -> list[str]:
        return [reason for step in release.Release(self.root).steps() for reason in step.missing]


def wheel(path: Path, files: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_release_of_which_nothing_is_missing_is_built_and_tagged_once(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkout.missing() == []
    assert release.main(["--dry-run"], checkout.root) == 0
    assert not (checkout.root / "dist").exists()
    assert checkout.git("tag") == ""
    assert release.main([], checkout.root) == 0
    names = {path.name for path in (checkout.root / "dist").iterdir()}
    assert names == {"mansio_mq-1.2.0-py3-none-any.whl", "mansio_mq-1.2.0.tar.gz"}
    assert checkout.git("tag", "--points-at", "HEAD") == "v1.2.0"
    assert release.main([], checkout.root) == 1
    assert "the tag v1.2.0 exists" in capsys.readouterr().out


MISSING: dict[str, tuple[Callable[[Checkout], None], str]] = {
    "development version": (
        lambda one: one.replace("src/mansio/version.py", "1.2.0", "1.2.0.dev0"),
        "has the development version 1.2.0.dev0",
    ),
    "owner": (
        lambda one: one.write("tools/owner.toml", (ROOT / "tools/owner.toml").read_text()),
        "tools/owner.toml: security_contact is empty",
    ),
    "no address": (
        lambda one: one.replace("tools/owner.toml", "https://git", "git"),
        "tools/owner.toml: repository is not an https address: git.example/mansio",
    ),
    "section": (
        lambda one: one.replace("CHANGELOG.md", "1.2.0 - 2030", "1.2.0 - soon, 2030"),
        "CHANGELOG.md has no section `## 1.2.0 - DATE`",
    ),
    "empty section": (
        lambda one: one.replace("CHANGELOG.md", "Unreleased\n", "Unreleased\n\n* Less.\n"),
        "no empty section `## Unreleased`",
    ),
    "formats": (
        lambda one: one.replace("docs/internals/releasing.md", "| 1.2.0", "| 1.1.0"),
        "has no row of 1.2.0",
    ),
    "licence": (lambda one: one.replace("NOTICE", "two", "three"), "NOTICE does not list two"),
    "figures": (
        lambda one: one.replace("docs/reference/performance.md", "1.2.0", "1.2.01"),
        "does not name 1.2.0",
    ),
    "install lines": (
        lambda one: one.replace("README.md", "'mansio-mq'", "dist/mansio_mq-*.whl"),
        "README.md:1: the wheel in dist/",
    ),
    "run": (
        lambda one: one.write("src/mansio/new.py", ""),
        "`python -m tools.release run nightly` passed at",
    ),
    "kept wheel": (
        lambda one: shutil.rmtree(one.root / "tests/fixtures"),
        "mansio_mq-1.2.0-py3-none-any.whl is not committed",
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_step_that_is_missing_refuses_the_release_with_its_reason(
    checkout: Checkout, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, reason = MISSING[name]
    change(checkout)
    checkout.commit()
    assert reason in "\n".join(checkout.missing())
    assert release.main([], checkout.root) == 1
    assert "nothing was built or tagged" in capsys.readouterr().err
    assert not (checkout.root / "dist").exists()
    assert checkout.git("tag") == ""


def test_changes_that_are_not_committed_refuse_a_release_and_a_run(checkout: Checkout) -> None:
    checkout.write("README.md", "changed")
    assert checkout.missing() == ["1 files are not committed: README.md"]
    with pytest.raises(release.ReleaseError, match="not be that of a commit"):
        release.Release(checkout.root).run("full")


@pytest.mark.parametrize("name", release.RUNS)
def test_a_run_that_was_not_done_is_missing(checkout: Checkout, name: str) -> None:
    (checkout.root / release.RECORDS).unlink()
    assert f"`python -m tools.release run {name}` has not passed here" in checkout.missing()


def test_a_run_is_recorded_if_it_passes_only(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout.root / release.RECORDS).unlink()
    one = release.Release(checkout.root)
    monkeypatch.setitem(release.RUNS, "full", ["false"])
    with pytest.raises(release.ReleaseError, match="`false` ended with 1"):
        one.run("full")
    assert len(checkout.missing()) == len(release.RUNS)
    monkeypatch.setitem(release.RUNS, "full", ["true"])
    one.run("full")
    assert not [reason for reason in checkout.missing() if " run full" in reason]
    with pytest.raises(release.ReleaseError, match="no tag of an earlier release"):
        one.run("start-times")


def test_two_builds_that_differ_are_not_tagged(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.replace("tools/dist.sh", "echo source", "echo $1")
    checkout.commit()
    checkout.record_runs()
    assert release.main([], checkout.root) == 1
    assert "two builds of this commit differ: mansio_mq-1.2.0.tar.gz" in capsys.readouterr().err
    assert (checkout.git("tag"), (checkout.root / "dist").exists()) == ("", False)


def test_a_kept_wheel_of_another_state_is_refused(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(checkout.root / "content.whl", {"mansio/a.py": "b", "mansio/commit.txt": "later"})
    checkout.commit()
    checkout.record_runs()
    assert release.main([], checkout.root) == 1
    assert "the kept wheel differs in mansio/a.py" in capsys.readouterr().err
    assert checkout.git("tag") == ""


@pytest.mark.parametrize(
    ("version", "reason"),
    [("1.3.0", "no development version"), ("1.2.0.dev0", "not later"), ("1.3.0.dev0", "not tagged yet")],
)
def test_the_next_version_is_a_later_one_after_the_tag(
    checkout: Checkout, version: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.main(["next", version], checkout.root) == 1
    assert reason in capsys.readouterr().err


def test_the_next_version_is_committed(checkout: Checkout) -> None:
    checkout.git("tag", "v1.2.0")
    assert release.main(["next", "1.3.0.dev0"], checkout.root) == 0
    assert (checkout.root / "src/mansio/version.py").read_text() == '__version__ = "1.3.0.dev0"\n'
    assert checkout.git("status", "--porcelain") == ""
    assert checkout.git("log", "-1", "--format=%s") == "Begin 1.3.0"


def test_notice_lists_every_dependency() -> None:
    words = set(re.findall(r"[\w.-]+", (ROOT / "NOTICE").read_text().lower()))
    assert set(release.dependencies((ROOT / "pyproject.toml").read_text())) - words == set()


def test_every_install_line_is_switched_to_the_package_index(tmp_path: Path) -> None:
    for page in install_lines.documents(ROOT):
        copy = tmp_path / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, copy)
    install_lines.switch(tmp_path)
    assert install_lines.old_lines(tmp_path) == []
    assert "pip install 'mansio-mq'\n" in (tmp_path / "README.md").read_text()
    assert install_lines.switch(tmp_path) == [], "a second switch changes nothing"


def test_the_owner_is_complete_and_nothing_else_is_in_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "owner.toml"
    path.write_text(OWNER)
    complete = owner.read(path)
    assert complete.problems() == []
    assert complete.metadata() == {
        "authors": [{"name": "Some Person", "email": "person@mail.example"}],
        "urls": {
            "Repository": "https://git.example/mansio",
            "Documentation": "https://docs.example/mansio",
        },
    }
    assert complete.contact() == "Report it to safety@mail.example."
    assert "not set yet" in owner.Owner().contact()
    assert owner.Owner().metadata() == {"authors": [], "urls": {}}
    path.write_text(OWNER + 'telephone = "1"\n')
    with pytest.raises(TypeError, match="telephone"):
        owner.read(path)
