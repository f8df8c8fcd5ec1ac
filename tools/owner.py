"""What only the owner of the project knows, from `tools/owner.toml`.

The build reads it for the metadata of the package (hatch_build.py), `make format` for SECURITY.md, and `tools.release`
refuses a release while a field is empty. Imports the standard library only, because builds run it.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent / "owner.toml"

EMAIL = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
ADDRESS = re.compile(r"https://[^\s/]+\.[^\s/]+(/\S*)?")
FORMS = {
    "name": (re.compile(r"\S(.*\S)?"), "a name"),
    "email": (EMAIL, "an e-mail address"),
    "repository": (ADDRESS, "an https address"),
    "documentation": (ADDRESS, "an https address"),
    "security_contact": (re.compile(f"{EMAIL.pattern}|{ADDRESS.pattern}"), "an e-mail or https address"),
}


@dataclass(frozen=True)
class Owner:
    """Fields of `tools/owner.toml`; empty: not set."""

    name: str = ""
    email: str = ""
    repository: str = ""
    documentation: str = ""
    security_contact: str = ""

    def problems(self) -> list[str]:
        """Return a line for each field that is empty or is not what it should be."""
        found = []
        for field in fields(self):
            value = getattr(self, field.name)
            form, meaning = FORMS[field.name]
            if not value:
                found.append(f"{field.name} is empty")
            elif not form.fullmatch(value):
                found.append(f"{field.name} is not {meaning}: {value}")
        return found

    def metadata(self) -> dict[str, Any]:
        """Return the authors and URLs of the package (PEP 621), without what is not set."""
        author = {key: value for key in ("name", "email") if (value := getattr(self, key))}
        urls = {"Repository": self.repository, "Documentation": self.documentation}
        return {
            "authors": [author] if author else [],
            "urls": {label: address for label, address in urls.items() if address},
        }

    def contact(self) -> str:
        """Return the sentence of SECURITY.md: where to report, or that this is not set."""
        if not self.security_contact:
            return (
                "**The contact is not set yet**: there is no private way to report a vulnerability so far. The\n"
                "owner of the project sets it in `tools/owner.toml` before the first public release."
            )
        return f"Report it to {self.security_contact}."


def read(path: Path = FILE) -> Owner:
    """Return the fields of the file. Raises TypeError for a field that does not exist."""
    return Owner(**tomllib.loads(path.read_text(encoding="utf-8")))
