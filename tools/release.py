"""The steps of docs/internals/releasing.md: `python -m tools.release [--dry-run]`, as often as wanted.

    --dry-run        list all steps and their states; changes nothing; exit code 1 while a step is missing
    run NAME         do what must pass before a release (full, nightly, bench, start-times), and record the commit
    install-lines    switch README and docs from the wheel in dist/ to the package index
    (no argument)    refuse while a step is missing; otherwise build twice, compare, write dist/, tag the commit
    next VERSION     after the tag: write the next development version, for example 0.3.0.dev0, and commit it

It uploads nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools import install_lines, owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent

VERSION_FILE = "src/mansio/version.py"
VERSION_LINE = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
RECORDS = ".release/passed.json"
"""Commits at which the runs passed, by name of the run; not tracked."""

RUNS: dict[str, list[str]] = {
    "full": ["make", "full"],
    "nightly": ["make", "nightly"],
    "bench": ["make", "bench"],
    "start-times": [".venv/bin/python", "-m", "bench.start_times", "{tag}"],
}
HARMLESS_AFTER_A_RUN = re.compile(
    r"tests/fixtures/wheels/[^/]+\.whl|docs/(?:reference/performance|internals/releasing)\.md|CHANGELOG\.md"
)
"""Files that may change between a recorded run and the release: those that later steps write."""

DIFFERS_IN_A_KEPT_WHEEL = re.compile(r"mansio/commit\.txt|[^/]+\.dist-info/RECORD")


class ReleaseError(Exception):
    """A step that failed, as one line."""


@dataclass(frozen=True)
class Step:
    """One step and what is missing of it; nothing: it is done."""

    title: str
    missing: Sequence[str]


class Release:
    """The release of the version in a checkout."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        found = VERSION_LINE.search(self._read(VERSION_FILE))
        if found is None:
            raise ReleaseError(f"{VERSION_FILE} has no version")
        self.version = found[1]
        self.tag = f"v{self.version}"

    def steps(self) -> Iterator[Step]:
        """Check each step that comes before the build; reads only."""
        checks: dict[str, Callable[[], Iterator[str]]] = {
            "version without .dev": self._development_version,
            "tag": self._existing_tag,
            "clean tree": self._changed_files,
            "owner": self._unset_owner,
            "changelog": self._changelog,
            "disk formats": self._format_row,
            "licences": self._missing_licences,
            "figures": self._figures,
            "install lines": self._install_lines,
            **{f"run {name}": lambda name=name: self._run_record(name) for name in RUNS},  # type: ignore[misc]
            "kept wheel": self._kept_wheel,
        }
        for title, check in checks.items():
            yield Step(title, [*check()])

    def run(self, name: str) -> None:
        """Do a run of `RUNS` and record the commit if it passes. Raises ReleaseError."""
        if changed := [*self._changed_files()]:
            raise ReleaseError(f"the run would not be that of a commit: {changed[0]}")
        command = [word.format(tag=self._earlier_tag()) if "{" in word else word for word in RUNS[name]]
        commit = self._git("rev-parse", "HEAD")
        if code := subprocess.run(command, cwd=self.root, check=False).returncode:
            raise ReleaseError(f"`{' '.join(command)}` ended with {code}")
        path = self.root / RECORDS
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**self._records(), name: commit}, indent=2) + "\n")

    def build(self) -> list[Path]:
        """Build twice, compare with each other and with the kept wheel, and write dist/. Raises ReleaseError."""
        with tempfile.TemporaryDirectory() as scratch:
            first, second = Path(scratch, "first"), Path(scratch, "second")
            for place in (first, second):
                subprocess.run([self.root / "tools/dist.sh", place], cwd=self.root, check=True)
            names = sorted(path.name for path in first.iterdir())
            if names != sorted(path.name for path in second.iterdir()):
                raise ReleaseError("two builds of this commit have different files")
            for name in names:
                if (first / name).read_bytes() != (second / name).read_bytes():
                    raise ReleaseError(f"two builds of this commit differ: {name}")
            wheel = first / self.wheel_name
            if wheel.name not in names:
                raise ReleaseError(f"the build wrote no {wheel.name}")
            if different := different_files(wheel, self.kept_wheel):
                raise ReleaseError(
                    f"the kept wheel differs in {different[0]}: run tools/keep_wheel.sh again and commit"
                )
            dist = self.root / "dist"
            dist.mkdir(exist_ok=True)
            for old in (*dist.glob("*.whl"), *dist.glob("*.tar.gz")):
                old.unlink()
            return [Path(shutil.copy(first / name, dist)) for name in names]

    def add_tag(self) -> None:
        """Tag the commit."""
        self._git("tag", "--annotate", self.tag, "--message", f"Mansio {self.version}")

    def set_next_version(self, version: str) -> None:
        """Write and commit the development version that follows the tagged release. Raises ReleaseError."""
        if not re.fullmatch(r"\d+\.\d+\.\d+\.dev0", version):
            raise ReleaseError(f"{version} is no development version such as 0.3.0.dev0")
        if _numbers(version) <= _numbers(self.version):
            raise ReleaseError(f"{version} is not later than {self.version}")
        if not self._git("tag", "--list", self.tag):
            raise ReleaseError(f"{self.version} is not tagged yet")
        if changed := [*self._changed_files()]:
            raise ReleaseError(changed[0])
        path = self.root / VERSION_FILE
        path.write_text(VERSION_LINE.sub(f'__version__ = "{version}"', path.read_text()))
        self._git("commit", "--quiet", "--message", f"Begin {version.removesuffix('.dev0')}", VERSION_FILE)

    @property
    def wheel_name(self) -> str:
        """File name of the wheel of this version."""
        return f"mansio_mq-{self.version}-py3-none-any.whl"

    @property
    def kept_wheel(self) -> Path:
        """Its copy for the upgrade tests of later versions."""
        return self.root / "tests/fixtures/wheels" / self.wheel_name

    def _development_version(self) -> Iterator[str]:
        if ".dev" in self.version:
            yield f"{VERSION_FILE} has the development version {self.version}"

    def _existing_tag(self) -> Iterator[str]:
        if self._git("tag", "--list", self.tag):
            yield f"the tag {self.tag} exists: a release does not change"

    def _changed_files(self) -> Iterator[str]:
        if changed := self._git("status", "--porcelain").splitlines():
            names = ", ".join(line.split(maxsplit=1)[1] for line in changed[:3])
            yield f"{len(changed)} files are not committed: {names}{', ...' if len(changed) > 3 else ''}"

    def _unset_owner(self) -> Iterator[str]:
        for problem in owner.read(self.root / "tools/owner.toml").problems():
            yield f"tools/owner.toml: {problem}"

    def _changelog(self) -> Iterator[str]:
        title = re.escape(self.version) + r" - 20\d\d-\d\d-\d\d"
        text = self._read("CHANGELOG.md")
        if not re.search(rf"^## {title}$", text, re.MULTILINE):
            yield f"CHANGELOG.md has no section `## {self.version} - DATE`"
        elif not re.search(rf"^## Unreleased\s+## {title}$", text, re.MULTILINE):
            yield "CHANGELOG.md has no empty section `## Unreleased` above it"

    def _format_row(self) -> Iterator[str]:
        if f"\n| {self.version} |" not in self._read("docs/internals/releasing.md"):
            yield f"the table of disk formats in docs/internals/releasing.md has no row of {self.version}"

    def _missing_licences(self) -> Iterator[str]:
        words = set(re.findall(r"[\w.-]+", self._read("NOTICE").lower()))
        for name in dependencies(self._read("pyproject.toml")):
            if name not in words:
                yield f"NOTICE does not list {name}"

    def _figures(self) -> Iterator[str]:
        if not re.search(
            rf"(?<![\d.]){re.escape(self.version)}(?!\.?\d)", self._read("docs/reference/performance.md")
        ):
            yield f"docs/reference/performance.md does not name {self.version} as the version of its figures"

    def _install_lines(self) -> Iterator[str]:
        if old := install_lines.old_lines(self.root):
            yield f"{', '.join(old)}: the wheel in dist/ instead of the package index (`install-lines` switches)"

    def _run_record(self, name: str) -> Iterator[str]:
        command = f"`python -m tools.release run {name}`"
        if (commit := self._records().get(name)) is None:
            yield f"{command} has not passed here"
            return
        try:
            changed = self._git("diff", "--name-only", commit, "HEAD").splitlines()
        except subprocess.CalledProcessError:
            yield f"{command} passed at {commit[:12]}, which this clone does not have"
            return
        if later := [path for path in changed if not HARMLESS_AFTER_A_RUN.fullmatch(path)]:
            yield f"{command} passed at {commit[:12]}, before {later[0]} changed"

    def _kept_wheel(self) -> Iterator[str]:
        path = self.kept_wheel.relative_to(self.root)
        if not self._git("ls-files", str(path)):
            yield f"{path} is not committed: tools/keep_wheel.sh writes it"

    def _earlier_tag(self) -> str:
        try:
            return self._git("describe", "--tags", "--abbrev=0", "--match", "v*", "--exclude", self.tag)
        except subprocess.CalledProcessError:
            raise ReleaseError("no tag of an earlier release to compare with") from None

    def _records(self) -> dict[str, str]:
        path = self.root / RECORDS
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def _read(self, name: str) -> str:
        return (self.root / name).read_text(encoding="utf-8")

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=self.root, check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip("\n")


def dependencies(pyproject: str) -> list[str]:
    """Return the names of all packages that the distribution requires, those of its extras included."""
    project = tomllib.loads(pyproject)["project"]
    required = [*project["dependencies"]]
    for extra in project.get("optional-dependencies", {}).values():
        required += extra
    names = {re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() for requirement in required}
    return sorted(names - {project["name"]})


def different_files(wheel: Path, kept: Path) -> list[str]:
    """Return the files in which two wheels of one version differ, except those with the commit of the build."""
    contents = []
    for path in (wheel, kept):
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not DIFFERS_IN_A_KEPT_WHEEL.fullmatch(name)]
            contents.append({name: archive.read(name) for name in names})
    built, before = contents
    return sorted(name for name in built.keys() | before.keys() if built.get(name) != before.get(name))


def report(steps: Sequence[Step]) -> str:
    """Return a line for each step, and one for each thing that it misses."""
    lines = []
    for step in steps:
        lines.append(f"{'missing' if step.missing else 'done':8}{step.title}")
        lines += [f"        - {reason}" for reason in step.missing]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; the exit code is 1 where a step is missing or fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="list the steps and their states only")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("run", help="do a run and record that it passed").add_argument("name", choices=RUNS)
    commands.add_parser("install-lines", help="switch README and docs to the package index")
    commands.add_parser("next", help="set the next development version").add_argument("version")
    options = parser.parse_args(arguments)
    try:
        release = Release(root)
        if options.command == "run":
            release.run(options.name)
        elif options.command == "install-lines":
            for page in install_lines.switch(root):
                print(page.relative_to(root))
        elif options.command == "next":
            release.set_next_version(options.version)
        else:
            return _release(release, dry_run=options.dry_run)
    except ReleaseError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        output = (error.stderr or "").strip()
        print(f"refused: {error}{': ' if output else ''}{output}", file=sys.stderr)
        return 1
    return 0


def _release(release: Release, *, dry_run: bool) -> int:
    steps = [*release.steps()]
    print(f"Release {release.version}\n{report(steps)}")
    if dry_run:
        print(f"to do   build twice and compare, write dist/, tag {release.tag}")
        print("by hand hand out or upload dist/: nothing is uploaded from here")
    if any(step.missing for step in steps):
        if not dry_run:
            print("refused: a step is missing; nothing was built or tagged", file=sys.stderr)
        return 1
    if not dry_run:
        for path in release.build():
            print(path.relative_to(release.root))
        release.add_tag()
        print(
            f"tagged {release.tag}: upload or hand out these files, then `python -m tools.release next VERSION`"
        )
    return 0


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.removesuffix(".dev0").split(".") if number.isdigit()]


if __name__ == "__main__":
    sys.exit(main())
