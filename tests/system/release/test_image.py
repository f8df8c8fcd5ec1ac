"""The container image: what is in it, and a broker that runs in it as in a container with a read-only file system.

Debian's tools unpack it and run it (umoci, skopeo, bubblewrap); `make full` fetches them.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import httpx
import pytest

from mansio.config.settings import SPECIFICATIONS
from support.container_image import HAS_TOOLS, USER, Image, build_image
from support.machine import scaled
from support.paths import free_port
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE_BYTES_MAX: Final = 150_000_000

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAS_TOOLS, reason="the tools come from Debian"),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return build_image("broker", tmp_path_factory.mktemp("image"))


def test_the_configuration_names_settings_that_exist_and_starts_protected(image: Image) -> None:
    config = image.config["config"]
    assert (config["User"], config["Entrypoint"], config["Cmd"]) == (
        str(USER),
        ["mansio"],
        ["serve", "--secure"],
    )
    assert (config["StopSignal"], config["Volumes"]) == ("SIGTERM", {"/data": {}})
    names = [
        name for name, _, _ in (entry.partition("=") for entry in config["Env"]) if name.startswith("MANSIO_")
    ]
    assert names
    assert all(name.removeprefix("MANSIO_").lower() in SPECIFICATIONS for name in names)
    assert not any("LISTENER" in name for name in names), "only the user opens the broker to other machines"


def test_the_image_is_small_and_has_no_file_that_gives_rights(image: Image) -> None:
    assert image.archive.stat().st_size < SIZE_BYTES_MAX
    modes = {path: path.lstat().st_mode for path in image.root.rglob("*")}
    assert not [path for path, mode in modes.items() if mode & (stat.S_ISUID | stat.S_ISGID)]
    open_to_all = [path for path, mode in modes.items() if mode & stat.S_IWOTH and not stat.S_ISLNK(mode)]
    assert open_to_all == [image.root / "tmp"]


class Container(NamedTuple):
    """A broker in the image. `pid` is its process, which is the first one of its namespace."""

    process: subprocess.Popen[bytes]
    pid: int
    environment: dict[str, str]
    command: list[str | Path]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the image beside the broker."""
        return subprocess.run(
            [*self.command, *arguments], capture_output=True, text=True, check=False, timeout=scaled(120)
        )


@contextmanager
def container(image: Image, data: Path) -> Iterator[Container]:
    kafka, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    environment = image.environment | {
        "MANSIO_LISTENERS": kafka,
        "MANSIO_HTTP_LISTENER": http,
        "MANSIO_BOOTSTRAP_SERVERS": kafka,
        "XDG_CONFIG_HOME": "/data/config",
    }
    command = image.command(data, environment)
    config = image.config["config"]
    with (data / "broker.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *config["Entrypoint"], *config["Cmd"]], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: _is_alive(http) or process.poll() is not None, scaled(60), "the broker is alive")
        assert process.poll() is None, (data / "broker.log").read_text()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield Container(process, int(children[0]), environment, command)
    finally:
        process.kill()
        process.wait()


def _is_alive(http: str) -> bool:
    try:
        return httpx.get(f"http://{http}/health/live").status_code == 200
    except httpx.TransportError:
        return False


def test_a_broker_in_the_image_serves_the_quickstart_and_stops_on_the_signal(
    image: Image, tmp_path: Path
) -> None:
    with container(image, tmp_path) as broker:
        check = " ".join(image.config["config"]["Healthcheck"]["Test"][1:3])
        assert check == "python3 -c"
        code = image.config["config"]["Healthcheck"]["Test"][3].replace(
            "127.0.0.1:9080", broker.environment["MANSIO_HTTP_LISTENER"]
        )
        assert broker.run("python3", "-c", code).returncode == 0
        security = "/data/security"
        files = [
            "--ca",
            f"{security}/ca.pem",
            "--user",
            "admin",
            "--password-file",
            f"{security}/admin.password",
        ]
        kafka = broker.environment["MANSIO_BOOTSTRAP_SERVERS"]
        refused = broker.run("mansio", "topic", "create", "orders")
        assert (refused.returncode, "accepts TLS only" in refused.stderr) == (1, True), refused
        assert broker.run("mansio", "context", "add", "secure", "-b", kafka, *files).returncode == 0
        created = broker.run("mansio", "topic", "create", "orders")
        assert created.returncode == 0, created
        produced = subprocess.run(
            [*broker.command, "mansio", "produce", "orders"],
            input="one\ntwo\n",
            text=True,
            check=True,
            capture_output=True,
            timeout=scaled(120),
        )
        assert produced.returncode == 0
        consumed = broker.run("mansio", "consume", "orders", "--from-beginning", "--exit-at-end")
        assert "one" in consumed.stdout, consumed
        assert "two" in consumed.stdout
        os.kill(broker.pid, signal.SIGTERM)
        assert broker.process.wait(scaled(60)) == 0
        assert broker.run("python3", "-c", code).returncode != 0
    events = (tmp_path / "broker.log").read_text()
    assert '"event": "broker_stopped"' in events
