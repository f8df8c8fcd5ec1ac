"""The documents: their links, paths, names and navigation, and the commands of `mansio` in them."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import typer
from tools import docs_site, document_checks, owner

from mansio.cli.main import app
from support.machine import scaled
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMAND = re.compile(r"(?:^\s*(?:\$ )?|`)mansio ((?:[a-z][a-z-]*(?: +|(?=`|$)))+)", re.MULTILINE)


@cache
def command_tree() -> Any:
    return typer.main.get_command(app)


def missing_commands(text: str) -> Iterator[str]:
    for words in COMMAND.findall(text):
        command = command_tree()
        for word in words.split():
            children = getattr(command, "commands", None)
            if not children:
                break
            if word not in children:
                yield f"mansio {words.strip()}"
                break
            command = children[word]


def test_a_document_names_commands_that_exist() -> None:
    for page in document_checks.pages(ROOT):
        assert not list(missing_commands(page.read_text())), page


def test_missing_commands_are_found() -> None:
    text = "`mansio serve`, `mansio topc list`, `mansio topic lst`\n"
    assert list(missing_commands(text)) == ["mansio topc list", "mansio topic lst"]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The root of a small project whose documents have no problem."""
    files = {
        "README.md": "[Index](docs/index.md)\n",
        "CHANGELOG.md": "# Changelog\n",
        "CONTRIBUTING.md": "# Contributing\n",
        "SECURITY.md": "# Security\n",
        "zensical.toml": "[project]\nnav = ['index.md', {First = ['tutorial/a.md', 'internals/changelog.md',"
        " 'internals/contributing.md', 'internals/security.md']}]\n",
        "docs/index.md": "[A](tutorial/a.md#one-two) [L](../CHANGELOG.md) [C](../CONTRIBUTING.md)"
        " [S](../SECURITY.md)\n",
        "docs/tutorial/a.md": "# A\n\n## One `two`\n\n* item\n    * nested\n\n```sh\n[no](link.md)\n```\n",
        "tools/one.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(document_checks.problems(tmp_path)) == []
    return tmp_path


@pytest.mark.parametrize(
    ("name", "added", "problem"),
    [
        ("docs/index.md", "[a](b.md)", "docs/index.md: the link to b.md leads to no file"),
        ("docs/index.md", "[a](tutorial/a.md#three)", "the link to tutorial/a.md#three leads to no heading"),
        ("docs/tutorial/a.md", "[a](#three)", "docs/tutorial/a.md: the link to #three leads to no heading"),
        ("README.md", "`tools/two.py`", "README.md: tools/two.py does not exist"),
        ("docs/index.md", "a\n* b", "a list needs an empty line before it"),
        ("docs/index.md", "1. a\n   * b", "a nested list is indented by four spaces"),
        ("docs/index.md", "* a\n\n  b", "a paragraph of a list item is indented by four spaces"),
        ("docs/index.md", "a\n| b |\n|---|", "a table needs an empty line before it"),
        ("docs/Reference.md", "# R", "docs/Reference.md: the name of a page has lower-case letters"),
        ("docs/other/b.md", "# B", "docs/other: pages are in docs/index.md or in docs/ tutorial"),
        ("docs/tutorial/b.md", "# B", "zensical.toml: tutorial/b.md is not in the navigation"),
        ("docs/adr/0001-b.md", "# B", "adr/0001-b.md is more than 3 clicks from index.md"),
    ],
)
def test_a_problem_of_the_documents_is_reported(site: Path, name: str, added: str, problem: str) -> None:
    page = site / name
    page.parent.mkdir(exist_ok=True)
    page.write_text(f"{page.read_text() if page.exists() else ''}\n{added}\n")
    found = list(document_checks.problems(site))
    assert any(problem in line for line in found), found


def test_a_page_that_is_four_links_away_is_reported(site: Path) -> None:
    adr = site / "docs/adr"
    adr.mkdir()
    with (site / "docs/index.md").open("a") as index:
        index.write("[1](adr/1.md)\n")
    for number in range(1, 5):
        (adr / f"{number}.md").write_text(f"[next](./{number % 4 + 1}.md)\n")
    assert list(document_checks.problems(site)) == ["adr/4.md is more than 3 clicks from index.md"]


def test_links_of_the_site_lead_to_its_pages_or_to_the_repository(
    site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (site / "docs/index.md").open("a") as index:
        index.write("[code](../tools/one.py) [R](../README.md) [web](https://a.example/b)\n")
    place = tmp_path_factory.mktemp("site")
    docs_site.stage(site, place)
    links = "[A](tutorial/a.md#one-two) [L](internals/changelog.md)"
    rest = "[R](index.md) [web](https://a.example/b)\n"
    page = (place / "pages/index.md").read_text()
    assert page.startswith(links)
    assert page.endswith(f"\ncode {rest}")
    assert "[no](link.md)" in (place / "pages/tutorial/a.md").read_text()

    (site / "docs/tutorial/a.md").unlink()
    known = owner.Owner(repository="https://code.example/mansio")
    monkeypatch.setattr(owner, "read", lambda: known)
    docs_site.stage(site, place)
    page = (place / "pages/index.md").read_text()
    assert page.endswith(f"\n[code](https://code.example/mansio/blob/main/tools/one.py) {rest}")
    assert not (place / "pages/tutorial/a.md").exists()
    assert 'repo_url = "https://code.example/mansio"' in (place / "zensical.toml").read_text()


@pytest.mark.parametrize(
    ("subject", "is_accepted"),
    [("x" * 72, True), ("x" * 73, False), ("é" * 72, True), ("Merge branch '" + "x" * 80 + "'", True)],
)
def test_a_subject_of_a_commit_has_at_most_72_characters(
    tmp_path: Path, subject: str, is_accepted: bool
) -> None:
    message = tmp_path / "message"
    message.write_text(f"# a comment\n\n{subject}\n\n{'y' * 100}\n", encoding="utf-8")
    ended = subprocess.run(
        [ROOT / "tools" / "hooks" / "commit-msg", message], timeout=scaled(30), capture_output=True
    )
    assert (ended.returncode == 0) == is_accepted, ended.stderr
