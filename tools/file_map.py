"""The table of folders in docs/internals/architecture.md: every package with the first sentence of its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line; empty where there is none."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def document() -> str:
    """The table, as Markdown: a row per package, with its modules."""
    lines = ["| folder | contents | modules |", "|---|---|---|"]
    for package in sorted(SOURCE.rglob("__init__.py")):
        folder = package.parent
        modules = sorted(path.stem for path in folder.glob("*.py") if path.name != "__init__.py")
        names = ", ".join(f"`{name}`" for name in modules)
        lines.append(f"| `{folder.relative_to(SOURCE)}/` | {summary(package)} | {names} |")
    return "\n".join(lines)
