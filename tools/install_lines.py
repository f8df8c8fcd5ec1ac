"""The lines of README and docs that install Mansio: from the wheel in `dist/`, after the upload from the package index.

`python -m tools.release install-lines` switches them, once, in the commit of the first release that is uploaded.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = (
    (re.compile(r"pip install dist/mansio_mq-\*\.whl"), "pip install 'mansio-mq'"),
    (re.compile(r"(uvx --from|pipx install) dist/mansio_mq-\*\.whl"), r"\1 mansio-mq"),
    (re.compile(r'pip install "\$\(echo dist/\*\.whl\)\[([\w,]+)\]"'), r"pip install 'mansio-mq[\1]'"),
)
SENTENCES = {
    """Linux or macOS, Python 3.11 or newer, and the wheel of a release, which `make dist` builds (Mansio is not
    on PyPI). With an extra""": "Linux or macOS, and Python 3.11 or newer. With an extra",
    """the wheel of a release (`make dist` writes it to `dist/`; Mansio is not on PyPI), and about five minutes. Every
    block can be pasted into a terminal in the directory that contains `dist/`:""": (
        "and about five minutes.\nEvery block can be pasted into a terminal:"
    ),
    """Until it is uploaded, a release is installed from its wheel: `pip install 'mansio-mq'`, with an extra
    `pip install 'mansio-mq[cluster]'`. Errors and documents name `pip install 'mansio-mq[EXTRA]'` for an extra that is
    missing: where the wheel is installed, pip takes it for the requirement and fetches only the packages of
    the extra.""": (
        "It is installed with\n`pip install 'mansio-mq'`, with an extra `pip install 'mansio-mq[cluster]'`."
    ),
}
"""Sentence, after the commands in it are switched -> what replaces it. Line breaks in the document do not matter."""

OLD = re.compile(r"\bdist/(?:mansio_mq-)?\*\.whl|(?:not\s+on\s+PyPI|Until\s+it\s+is\s+uploaded)")
"""What no document has after the switch."""


def documents(root: Path) -> list[Path]:
    """Return README and docs; decisions (docs/adr) stay as they were written."""
    pages = [page for page in sorted((root / "docs").rglob("*.md")) if "adr" not in page.parts]
    return [root / "README.md", *pages]


def _switched(text: str) -> str:
    """Return the document with commands and sentences for the package index."""
    for command, replacement in COMMANDS:
        text = command.sub(replacement, text)
    for sentence, instead in SENTENCES.items():
        words = r"\s+".join(re.escape(word) for word in sentence.split())
        text = re.sub(words, instead.replace("\\", r"\\"), text)
    return text


def old_lines(root: Path) -> list[str]:
    """Return `FILE:LINE` of everything that still installs the wheel in `dist/`."""
    found = []
    for page in documents(root):
        text = page.read_text(encoding="utf-8")
        for match in OLD.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{page.relative_to(root)}:{line}")
    return found


def switch(root: Path) -> list[Path]:
    """Rewrite the documents, and return those that changed."""
    changed = []
    for page in documents(root):
        text = page.read_text(encoding="utf-8")
        if (after := _switched(text)) != text:
            page.write_text(after, encoding="utf-8")
            changed.append(page)
    return changed
