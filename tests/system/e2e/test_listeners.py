"""Listeners of `mansio serve`: its ready line, its refusals, IPv6 for every protocol, and the page about listeners."""

from __future__ import annotations

import json
import socket
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import mansio
from support.documents import examples
from support.machine import scaled
from support.paths import free_port, mansio_command
from support.process import inherited
from support.sqs import sqs_client
from system.e2e.test_examples import Bench, started

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROTOCOLS = ("--set", "listener_security_protocol_map=INSIDE:PLAINTEXT,OUTSIDE:PLAINTEXT")
START_S_MAX = 60


@pytest.fixture
def ipv6_loopback() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")


@contextmanager
def served(data: Path, *arguments: str) -> Iterator[dict[str, str]]:
    """A broker; the words of its ready line by name."""
    command = [*mansio_command(), "serve", "--data", str(data), *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=inherited()
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert " ready " in line
            yield dict(word.split("=", 1) for word in line.split() if "=" in word)
            process.terminate()
            assert process.wait(scaled(START_S_MAX)) == 0
        finally:
            process.kill()


def refused(data: Path, *arguments: str) -> str:
    """The last line of a broker that does not start."""
    command = [*mansio_command(), "serve", "--data", str(data), "--http", "", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=inherited(), timeout=scaled(START_S_MAX), check=False
    )
    assert done.returncode in (1, 2), done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("ipv6_loopback")
def test_every_protocol_is_served_on_ipv6(tmp_path: Path) -> None:
    import grpc
    import httpx
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    names = ("kafka", "http", "sqs", "grpc")
    arguments = [word for name in names for word in (f"--{name}", "[::1]:0")]
    with served(tmp_path / "data", *arguments) as words:
        assert all(words[name].startswith("[::1]:") for name in names), words
        with mansio.blocking.connect(words["kafka"]) as client:
            client.admin.create_topic("t")
            client.publish("t", b"1")
            assert [each.host for each in client.admin.describe_cluster().brokers] == ["::1"]
        with httpx.Client(base_url=f"http://{words['http']}", timeout=scaled(20)) as http:
            assert http.get("/health/ready").status_code == 200
            found = http.get("/v1/topics/t/partitions/0/records")
            assert (found.status_code, len(found.json()["records"])) == (200, 1), found.text
        sqs = sqs_client(f"http://{words['sqs']}")
        url = sqs.create_queue(QueueName="q")["QueueUrl"]
        assert url.startswith(f"http://{words['sqs']}/")
        sqs.send_message(QueueUrl=url, MessageBody="1")
        sqs.close()
        with grpc.insecure_channel(words["grpc"]) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            status = health.Check(health_pb2.HealthCheckRequest(), timeout=scaled(20)).status
        assert status == health_pb2.HealthCheckResponse.SERVING


def test_the_ready_line_has_every_listener_and_config_show_the_settings(tmp_path: Path) -> None:
    kafka = "INSIDE://127.0.0.1:0,OUTSIDE://127.0.0.1:0"
    with served(tmp_path / "data", "--kafka", kafka, "--http", "", *PROTOCOLS) as words:
        names, addresses = zip(*(each.split("://") for each in words["kafka"].split(",")), strict=True)
        assert names == ("INSIDE", "OUTSIDE")
        for address in addresses:
            with mansio.blocking.connect(address) as client:
                (broker,) = client.admin.describe_cluster().brokers
                assert f"{broker.host}:{broker.port}" == address
    command = [*mansio_command(), "config", "show", "--kafka", kafka, *PROTOCOLS, "--output", "json"]
    shown = subprocess.run(command, capture_output=True, text=True, env=inherited(), check=True).stdout
    rows = {row["name"]: row for row in json.loads(shown)}
    assert (rows["listeners"]["value"], rows["listeners"]["origin"]) == (kafka, "flag")
    assert rows["inter_broker_listener_name"]["value"] == ""


def test_a_listener_that_cannot_be_served_ends_the_start_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refused(tmp_path, "--kafka", f"INSIDE://127.0.0.1:0,OUTSIDE://{address}", *PROTOCOLS)
        assert line.startswith(f"mansio: {address} is in use by ")
        assert line.endswith(": use --kafka for another port")
    line = refused(tmp_path, "--kafka", "SSL://127.0.0.1:0")
    assert "ssl_certificate_location: listeners with TLS need it" in line
    line = refused(tmp_path, "--kafka", "host.invalid:0", "--set", "insecure_listen=true")
    assert line.startswith("mansio: cannot listen on host.invalid:0: ")


class ListenersBench(Bench):
    """The broker of the page, with free ports in place of its own."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        outside = free_port()
        self.addresses |= {
            "127.0.0.1:19092": f"127.0.0.1:{outside}",
            "localhost:19092": f"localhost:{outside}",
        }


def test_the_example_about_listeners_shows_what_it_prints(tmp_path: Path) -> None:
    document = "docs/how-to/listeners.md"
    with started(tmp_path, document, ListenersBench) as bench:
        found = examples(document)
        assert list(found) == ["serve", "brokers"]
        bench.follow(found)
