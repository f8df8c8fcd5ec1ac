"""The Python interpreter a benchmark runs on: a build without PGO and LTO is 10 to 30 % slower."""

from __future__ import annotations

import platform
import sys
import sysconfig


def interpreter() -> str:
    """Version and build: `3.11.7 CPython, built without PGO and LTO`. The rule is that of tools/find_python.sh."""
    names = ("CONFIG_ARGS", "PY_CORE_LDFLAGS", "PY_CORE_CFLAGS")
    options = " ".join(str(sysconfig.get_config_var(name)) for name in names)
    optimised = sys.base_prefix == "/usr" or "--enable-optimizations" in options or "-flto" in options
    build = "optimised build" if optimised else "built without PGO and LTO"
    return f"{platform.python_version()} {platform.python_implementation()}, {build}"
