"""Container images of this source tree, unpacked and run by Debian's tools: umoci, skopeo and bubblewrap."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from support.machine import scaled
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TOOLS: Final = ROOT / ".tools" / "bin"
HAS_TOOLS: Final = all((TOOLS / name).exists() for name in ("mmdebstrap", "umoci", "skopeo", "bwrap"))
USER: Final = 10001
COMMAND_S: Final = 120.0


class Image(NamedTuple):
    """`root`: the unpacked file system. `config`: the image configuration of OCI."""

    archive: Path
    root: Path
    config: dict[str, Any]

    @property
    def environment(self) -> dict[str, str]:
        return dict(entry.split("=", 1) for entry in self.config["config"]["Env"])

    def command(self, data: Path, environment: Mapping[str, str]) -> list[str | Path]:
        """The beginning of a command that runs a program in the image: its file system is read-only except `/data` and
        `/tmp`, its network and host names are those of the machine, and its variables are `environment` only."""
        command: list[str | Path] = [TOOLS / "bwrap", "--unshare-user", "--unshare-pid", "--die-with-parent"]
        command += ["--uid", str(USER), "--gid", str(USER), "--as-pid-1", "--bind", self.root, "/"]
        command += ["--ro-bind", "/etc/hosts", "/etc/hosts", "--remount-ro", "/"]
        command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--bind", data, "/data"]
        command += ["--chdir", self.config["config"]["WorkingDir"], "--clearenv"]
        for name, value in environment.items():
            command += ["--setenv", name, value]
        return command


def output_of(*command: str | Path, seconds: float = COMMAND_S) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=scaled(seconds))
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def build_image(flavour: str, folder: Path) -> Image:
    """Build the image of a flavour for this machine's architecture, and unpack it."""
    architecture = output_of("dpkg", "--print-architecture").strip()
    options = ["--flavour", flavour, "--architecture", architecture, str(folder)]
    subprocess.run([sys.executable, "-m", "tools.image", *options], cwd=ROOT, check=True, timeout=scaled(900))
    (archive,) = folder.glob("*.oci.tar")
    config = json.loads(output_of(TOOLS / "skopeo", "inspect", "--config", "--raw", f"oci-archive:{archive}"))
    layout, unpacked = folder / "layout", folder / "unpacked"
    copied = (f"oci-archive:{archive}", f"oci:{layout}:image")
    output_of(TOOLS / "skopeo", "copy", "--insecure-policy", *copied, seconds=600)
    output_of(TOOLS / "umoci", "unpack", "--rootless", "--image", f"{layout}:image", unpacked, seconds=600)
    return Image(archive, unpacked / "rootfs", config)
