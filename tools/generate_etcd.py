"""The Python for `src/mansio/metadata/etcd/rpc.proto`: `python -m tools.generate_etcd [--check]`.

Kept in the repository, so that an installation needs no compiler. Without `--check` it is written; with it, files that
differ from what the compiler makes are an error. Change the compiler's version together with the extra `cluster` in
pyproject.toml: the code refuses to run with a protobuf older than the one it was made for.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED_DIRECTORY = "mansio/metadata/etcd"
GENERATED_FILES = ("rpc_pb2.py", "rpc_pb2.pyi")


def compiled() -> dict[str, str]:
    """File name -> content, as the compiler of grpcio-tools makes them."""
    from grpc_tools import protoc  # the development tools bring it

    with tempfile.TemporaryDirectory() as out:
        source = f"{GENERATED_DIRECTORY}/rpc.proto"
        arguments = ["protoc", f"--proto_path={ROOT}/src", f"--python_out={out}", f"--pyi_out={out}", source]
        if protoc.main(arguments) != 0:
            raise SystemExit("rpc.proto does not compile")
        return {name: (Path(out) / GENERATED_DIRECTORY / name).read_text() for name in GENERATED_FILES}


def stale() -> list[str]:
    """The files that are missing or differ from what the compiler makes."""
    home = ROOT / "src" / GENERATED_DIRECTORY
    return [
        name
        for name, content in compiled().items()
        if not (home / name).exists() or (home / name).read_text() != content
    ]


def main() -> None:
    if "--check" in sys.argv[1:]:
        if old := stale():
            sys.exit(f"not up to date: {', '.join(old)} (`python -m tools.generate_etcd` writes them)")
        return
    for name, content in compiled().items():
        (ROOT / "src" / GENERATED_DIRECTORY / name).write_text(content)


if __name__ == "__main__":
    main()
