"""Process from which brokers are forked: it has imported all modules they need and does nothing else.

One line in for each broker, its process id out. Always true: a broker is in a session of its own, with nothing of its
parent but modules; the parent waits for none, and ends when its input does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import random
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

PACKAGES = ("api", "broker", "cli", "metadata", "node", "state", "storage", "wire")
USED_BY_THEM = ("pydantic_settings", "typer.main", "uvicorn", "uvloop", "yaml")


def import_all() -> None:
    """What a broker imports by and by."""
    for package in PACKAGES:
        found = importlib.import_module(f"mansio.{package}")
        for each in pkgutil.walk_packages(found.__path__, f"mansio.{package}."):
            importlib.import_module(each.name)
    for name in USED_BY_THEM:
        importlib.import_module(name)
    for _ in importlib.import_module("mansio.wire.codec.messages").preload_schemas():
        pass


def run() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    killing = importlib.import_module("support.killing_serve")
    import_all()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what ends is gone at once
    for line in sys.stdin:
        known = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        try:
            begin(known)
            killing.serve(known["point"])
        except BaseException:  # noqa: BLE001 - it is the last word of the process
            traceback.print_exc()
        finally:
            os._exit(1)


def begin(known: dict[str, Any]) -> None:
    """Nothing of the parent is left but modules."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    random.seed()
    output = os.open(known["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["mansio", *known["arguments"]]


if __name__ == "__main__":
    run()
