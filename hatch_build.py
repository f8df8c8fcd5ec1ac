"""Build hooks: the commit in the distributions, for `mansio --version`, and the owner in their metadata.

The source distribution is built in a checkout. The wheel is built from the source distribution, which has the file.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

FILE = "src/mansio/commit.txt"
READER = "src/mansio/cli/support/build_commit.py"
OWNER = "tools/owner.py"


class CommitHook(BuildHookInterface):  # type: ignore[type-arg]  # its parameter is a class of hatchling
    """Adds the file with the commit to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a build. `version`: "editable" for an installation of a checkout, which asks git itself."""
        if version == "editable":
            return
        path = Path(self.root, FILE)
        if not path.exists():
            path = self._written = Path(self.directory, "commit.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            commit_of_checkout = runpy.run_path(str(Path(self.root, READER)))["commit_of_checkout"]
            path.write_text(commit_of_checkout(Path(self.root)))
        target = FILE if self.target_name == "sdist" else FILE.removeprefix("src/")
        build_data["force_include"][str(path)] = target

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Called after a build."""
        if (written := getattr(self, "_written", None)) is not None:
            written.unlink()


class OwnerHook(MetadataHookInterface):
    """Adds what only the owner knows, as far as tools/owner.toml has it."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called with the metadata of pyproject.toml."""
        metadata.update(runpy.run_path(str(Path(self.root, OWNER)))["read"]().metadata())
