"""The Python for the .proto files of the source: `python -m tools.generate_protobuf [--check]`.

Kept in the repository, so that an installation needs no compiler. Without `--check` it is written; with it, files that
differ from what the compiler makes are an error. Change the compiler's version together with the extras `cluster` and
`grpc` in pyproject.toml: the code refuses to run with a protobuf older than the one it was made for.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("mansio/metadata/etcd/rpc.proto", "mansio/api/grpc/mansio.proto")


def compiled() -> dict[str, str]:
    """Path in `src` -> content, as the compiler of grpcio-tools makes them."""
    from grpc_tools import protoc  # the development tools bring it

    found = {}
    with tempfile.TemporaryDirectory() as out:
        for source in SOURCES:
            arguments = [
                "protoc",
                f"--proto_path={ROOT}/src",
                f"--python_out={out}",
                f"--pyi_out={out}",
                source,
            ]
            if protoc.main(arguments) != 0:
                raise SystemExit(f"{source} does not compile")
            for suffix in ("_pb2.py", "_pb2.pyi"):
                name = source.removesuffix(".proto") + suffix
                found[name] = (Path(out) / name).read_text()
    return found


def stale() -> list[str]:
    """The files that are missing or differ from what the compiler makes."""
    home = ROOT / "src"
    return [
        name
        for name, content in compiled().items()
        if not (home / name).exists() or (home / name).read_text() != content
    ]


def main() -> None:
    if "--check" in sys.argv[1:]:
        if old := stale():
            sys.exit(f"not up to date: {', '.join(old)} (`python -m tools.generate_protobuf` writes them)")
        return
    for name, content in compiled().items():
        (ROOT / "src" / name).write_text(content)


if __name__ == "__main__":
    main()
