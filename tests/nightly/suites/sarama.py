"""sarama's functional tests, against a cluster whose brokers are reached through toxiproxy.

The tests start and stop brokers with `docker compose`; a program of that name stands in for it and has the runner do
it. What they would run inside Kafka's containers (its Java clients) is not there: those tests skip themselves.
"""

from __future__ import annotations

import json
import os
import shlex
import socketserver
import subprocess
import sys
import tempfile
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nightly.suites.brokers import AUTHORIZER, FOLDER
from nightly.suites.commands import checked
from nightly.suites.go_tests import BUILD_LIMIT_S, LOCAL_TOOLS, go_test, module_copy, tests_in
from nightly.suites.suite import WORK, Suite
from support.cluster import cluster
from support.paths import free_port, mansio_command
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nightly.suites.expected import Expected
    from nightly.suites.suite import Outcomes
    from support.cluster import Cluster

VERSION = "1.61.1"
TOXIPROXY_VERSION = "2.5.0"
KAFKA_VERSION = "4.1.0"
"""Selects the tests that apply."""
BROKERS = 3
LIMIT_S = 2400
COMPOSE = """\
#!{python} -S
import socket, sys
with socket.socket(socket.AF_UNIX) as peer:
    peer.connect({path!r})
    peer.sendall(" ".join(sys.argv[1:]).encode() + b"\\n")
    sys.stdout.write(peer.makefile().read())
"""


def run(directory: Path, expected: Expected, only: frozenset[str] | None) -> Outcomes:
    module = directory / "module"
    if only is None:
        module = module_copy("github.com/IBM/sarama", f"v{VERSION}", directory)
    names = tests_in(module.glob("functional_*_test.go"))
    ports = {node_id: free_port() for node_id in range(1, BROKERS + 1)}
    _use_ports(module, ports)
    commands = {
        node_id: [
            "env",
            f"MANSIO_ADVERTISED_LISTENERS=127.0.0.1:{port}",
            f"MANSIO_BROKER_RACK={node_id}",
            *mansio_command(),
        ]
        for node_id, port in ports.items()
    }
    program = _build_toxiproxy(directory)
    with (
        cluster(
            directory / FOLDER,
            brokers=BROKERS,
            commands=commands,
            default_replication_factor=2,
            topic_defaults=json.dumps({"min.insync.replicas": "1"}),
            offsets_topic_num_partitions=10,
            group_initial_rebalance_delay_ms=0,
            **AUTHORIZER,
        ) as brokers,
        toxiproxy(program, directory) as proxies,
        compose(brokers) as programs,
    ):
        for node_id, port in ports.items():
            upstream = brokers.brokers[node_id].bootstrap_servers
            _add_proxy(proxies, f"kafka{node_id}", f"127.0.0.1:{port}", upstream)
        return go_test(
            module,
            only if only is not None else set(names) - set(expected.skipped),
            log=directory / "tests.log",
            limit_s=LIMIT_S,
            flags=("-tags=functional",),
            environment={
                "TOXIPROXY_ADDR": proxies,
                "KAFKA_VERSION": KAFKA_VERSION,
                "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            },
        )


def _use_ports(module: Path, ports: dict[int, int]) -> None:
    """The tests have the addresses of five proxies as constants."""
    file = module / "functional_test.go"
    source = file.with_suffix(".go.original")
    if not source.exists():
        source.write_text(file.read_text())
    listed = ", ".join(map(str, ports.values()))
    text = source.read_text().replace("i <= 5", f"i <= {len(ports)}")
    file.write_text(text.replace("29090+i", f"[]int{{0, {listed}}}[i]"))


def _build_toxiproxy(directory: Path) -> Path:
    folder = WORK / f"toxiproxy-{TOXIPROXY_VERSION}"
    if not (folder / "server").exists():
        checked(
            ["go", "install", f"github.com/Shopify/toxiproxy/v2/cmd/server@v{TOXIPROXY_VERSION}"],
            log=directory / "go.log",
            limit_s=BUILD_LIMIT_S,
            environment={**LOCAL_TOOLS, "GOBIN": str(folder)},
        )
    return folder / "server"


@contextmanager
def toxiproxy(program: Path, directory: Path) -> Iterator[str]:
    """The URL of a running toxiproxy; killed at the end."""
    port = free_port()
    with (directory / "toxiproxy.log").open("ab") as log:
        process = subprocess.Popen(
            [program, "-host", "127.0.0.1", "-port", str(port)], stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _answers(f"{url}/version"), 30, "toxiproxy answers")
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def _add_proxy(url: str, name: str, listen: str, upstream: str) -> None:
    proxy = {"name": name, "listen": listen, "upstream": upstream, "enabled": True}
    request = urllib.request.Request(f"{url}/proxies", json.dumps(proxy).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=30):
        pass


@contextmanager
def compose(brokers: Cluster) -> Iterator[Path]:
    """A directory with a program `docker` that knows `compose start|stop|logs kafka-N`."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            words = shlex.split(self.rfile.readline().decode())
            node_id = int(words[-1].rpartition("-")[2])
            broker = brokers.brokers[node_id]
            if "stop" in words:
                broker.stop()
            elif "start" in words and not broker.running:
                broker.start()
            elif "logs" in words:
                self.wfile.write(broker.text().encode())

    with tempfile.TemporaryDirectory(prefix="compose-") as folder:
        path = str(Path(folder) / "socket")
        program = Path(folder) / "docker"
        program.write_text(COMPOSE.format(python=sys.executable, path=path))
        program.chmod(0o755)
        with socketserver.ThreadingUnixStreamServer(path, Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield Path(folder)
            finally:
                server.shutdown()
                thread.join()


SARAMA = Suite(
    "sarama",
    VERSION,
    ("go",),
    run,
    f"{BROKERS} brokers and etcd, behind toxiproxy {TOXIPROXY_VERSION}; functional tests",
)
