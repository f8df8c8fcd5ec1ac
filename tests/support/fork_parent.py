"""Process from which `mansio` is forked: it has imported all modules that a broker or a command needs.

It reads one request a line and answers each with a line, both JSON: `{"start": ...}` with the id of a new process,
`{"poll": id}` with its exit code, or null while it runs. Always true: a forked process is in a session of its own, with
nothing of its parent but modules; it is reaped by the request that finds it ended, so until then its id is no other's;
the parent ends when its input does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import random
import sys
import traceback
from pathlib import Path
from typing import Any

PACKAGES = ("api", "broker", "cli", "metadata", "node", "state", "storage", "wire")
USED_BY_THEM = ("pydantic_settings", "typer.main", "uvicorn", "uvloop", "yaml")


def import_all() -> None:
    """What brokers and commands import by and by."""
    sys.modules.setdefault("hypothesis", None)  # type: ignore[arg-type]  # see `mansio.cli.main`
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
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            ended, status = os.waitpid(request["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if ended else None), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        code = 1
        try:
            begin(request["start"])
            killing.serve(request["start"]["point"])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 - it is the last word of the process
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def begin(start: dict[str, Any]) -> None:
    """Nothing of the parent is left but modules."""
    os.setsid()
    random.seed()
    os.environ.clear()
    os.environ.update(start["environment"])
    os.chdir(start["directory"])
    for number, path in enumerate(start["files"]):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT if number else os.O_RDONLY
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode, 1) for number, mode in enumerate("rww"))  # noqa: SIM115
    sys.argv = ["mansio", *start["arguments"]]


if __name__ == "__main__":
    run()
