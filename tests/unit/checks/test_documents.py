"""The documents: the files that they name, their links and the commands of `mansio` in them exist."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import typer

from mansio.cli.main import app
from support.machine import scaled
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDERS = ("", "src", "src/mansio", "tests", "docs")
"""Folders to which paths in documents are relative, besides that of the document."""

BLOCK = re.compile(r"```.*?```", re.DOTALL)
PATH = re.compile(r"`([\w.*-]+/[\w./*-]*\.(?:py|md|sh|yaml|toml|proto|txt)|[\w.*-]+/[\w./*-]*/)`")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
COMMAND = re.compile(r"(?:^\s*(?:\$ )?|`)mansio ((?:[a-z][a-z-]*(?: +|(?=`|$)))+)", re.MULTILINE)
PLACEHOLDER = re.compile(r"[A-Z]{3,}")


def documents() -> list[Path]:
    top = (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


def missing_files(page: Path, text: str) -> Iterator[str]:
    prose = BLOCK.sub("", text)
    for path in PATH.findall(prose):
        if not PLACEHOLDER.search(path) and not any(
            next(folder.glob(path), None) for folder in (page.parent, *(ROOT / name for name in FOLDERS))
        ):
            yield path
    for path in LINK.findall(prose):
        if not (page.parent / path).exists():
            yield f"link to {path}"


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


def test_a_document_names_files_and_commands_that_exist() -> None:
    for page in documents():
        text = page.read_text()
        assert not [*missing_files(page, text), *missing_commands(text)], page


def test_missing_files_links_and_commands_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "`wire/none.py`, `wire/framing.py`, [a](b.md), `mansio serve`, `mansio topc list`, `mansio topic lst`\n"
    assert list(missing_files(page, text)) == ["wire/none.py", "link to b.md"]
    assert list(missing_commands(text)) == ["mansio topc list", "mansio topic lst"]


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
