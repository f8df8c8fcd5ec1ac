"""The file map of docs/ARCHITECTURE.md: every module with the first sentence of its own docstring."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "mansio"

ROOMS = {
    "": "What everybody may use",
    "wire": "Kafka's protocol: bytes to values and back. Pure",
    "log": "One log on disk, through ports",
    "state": "State machines. Pure",
    "link": "Connections to brokers; whatever in this project talks to a broker goes through here",
    "client": "The Python client",
    "cluster": "Who exists and who leads",
    "broker": "One broker: composition and I/O",
    "api": "The other doors",
    "cli": "The `mansio` command",
    "testing": "For tests, ours and other people's",
}


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line; empty where there is none."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def document() -> str:
    """The map, as Markdown: a table per room."""
    lines: list[str] = []
    for room, meaning in ROOMS.items():
        files = sorted(PACKAGE.glob("*.py")) if not room else sorted((PACKAGE / room).rglob("*.py"))
        rows = [f"| `{path.relative_to(PACKAGE)}` | {summary(path)} |" for path in files if summary(path)]
        if rows:
            title = f"`{room}/`: {meaning[0].lower()}{meaning[1:]}" if room else meaning
            lines += [f"### {title}", "", "| file | what it is for |", "|---|---|", *rows, ""]
    return "\n".join(lines).rstrip()
