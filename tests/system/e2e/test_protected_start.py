"""`mansio serve --secure`: the commands that it prints work as printed, and no secret is in its output or log."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import ssl
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx
import pytest

from support.documents import examples
from support.machine import scaled
from support.paths import TOOLS, free_port, mansio_command, required_tool
from support.process import inherited
from support.waiting import wait_until
from system.e2e.test_examples import Bench, started

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_S = 60
SECTION = re.compile(r"^# (\S+)\n(.*?)(?=^# |\Z)", re.MULTILINE | re.DOTALL)


class ProtectedBroker(NamedTuple):
    """A broker that was started with `--secure`; the files with its output and its log."""

    data: Path
    address: str
    output: Path
    log: Path

    @property
    def password(self) -> str:
        return (self.data / "security/admin.password").read_text().removesuffix("\n")

    def printed_lines(self) -> dict[str, str]:
        """The printed commands by client."""
        return dict(SECTION.findall(self.output.read_text()))

    def follow(self, lines: str) -> str:
        """Run commands in a shell of a user of their own; return what they print."""
        return follow(self.data.parent, lines)


def follow(directory: Path, lines: str) -> str:
    """Run commands in `directory`, in a shell of a user whose contexts are there; return what they print."""
    environment = {
        **{name: text for name, text in inherited().items() if not name.startswith(("MANSIO_", "PYTEST"))},
        "XDG_CONFIG_HOME": str(directory / "config"),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), str(TOOLS), os.environ["PATH"])),
    }
    done = subprocess.run(
        ["sh", "-euc", lines],
        env=environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(DEADLINE_S),
        check=False,
    )
    assert done.returncode == 0, f"{lines}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def served(directory: Path, *arguments: str) -> Iterator[ProtectedBroker]:
    address = f"127.0.0.1:{free_port()}"
    broker = ProtectedBroker(directory / "data", address, directory / "output", directory / "log")
    command = [
        *mansio_command(),
        *("serve", "--secure", "--data", str(broker.data), "--kafka", address, "--http", "", *arguments),
    ]
    with broker.output.open("ab") as output, broker.log.open("ab") as log:
        process = subprocess.Popen(command, stdout=output, stderr=log, env=inherited())
    try:
        wait_until(
            lambda: "kcat -F" in broker.output.read_text() or process.poll() is not None,
            scaled(DEADLINE_S),
            "the broker prints how to connect",
        )
        assert process.poll() is None, broker.log.read_text()
        yield broker
        process.terminate()
        assert process.wait(scaled(DEADLINE_S)) == 0
    finally:
        process.kill()
        process.wait()


def test_printed_commands_of_mansio_work_and_nothing_printed_or_logged_is_secret(tmp_path: Path) -> None:
    with served(tmp_path, "--set", "log_level=debug") as broker:
        lines = broker.printed_lines()
        assert list(lines) == ["mansio", "confluent-kafka", "kcat"]
        printed = broker.follow(lines["mansio"])
        assert broker.address in printed
        shown = broker.output.read_text() + broker.log.read_text()
    assert "broker_ready" in shown
    assert broker.password not in shown
    assert "PRIVATE KEY" not in shown


def test_http_has_tls_from_the_first_start_on(tmp_path: Path) -> None:
    """The listener begins before the broker does."""
    http = f"127.0.0.1:{free_port()}"
    with served(tmp_path, "--http", http, "--set", "http_security_protocol=SASL_SSL") as broker:
        trusted = ssl.create_default_context(cafile=broker.data / "security/ca.pem")
        with httpx.Client(verify=trusted, base_url=f"https://{http}", timeout=scaled(20)) as client:
            assert client.get("/v1/topics").status_code == 401
            assert client.get("/v1/topics", auth=("admin", broker.password)).json()["topics"] == []


@pytest.mark.full
def test_printed_commands_of_other_clients_work_before_and_after_a_restart(tmp_path: Path) -> None:
    required_tool("kcat")
    directory = tmp_path / "a user's files"  # the commands quote the paths
    directory.mkdir()
    for number in range(2):
        (directory / "output").unlink(missing_ok=True)
        with served(directory) as broker:
            lines = broker.printed_lines()
            assert f"1 brokers:\n  broker 1 at {broker.address}" in broker.follow(lines["kcat"])
            assert f"BrokerMetadata(1, {broker.address})" in broker.follow(lines["confluent-kafka"])
            if number == 0:
                broker.follow(lines["mansio"])
                report = broker.follow("mansio doctor || true")
                assert re.search(rf"^ok +broker +{broker.address}", report, re.MULTILINE), report
                broker.follow("mansio topic create t && echo one | mansio produce t")
            conf = broker.data / "security/kcat.conf"
            assert conf.stat().st_mode & 0o777 == 0o600
            assert broker.follow(f"kcat -F {shlex.quote(str(conf))} -C -t t -o beginning -e -q") == "one\n"


@pytest.mark.full
def test_a_terminal_shows_the_new_password_once(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    command = [*mansio_command(), "serve", "--secure", "--data", "d", "--kafka", address, "--http", ""]
    shown = []
    for _ in range(2):
        ours, theirs = pty.openpty()
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=theirs, stderr=log, env=inherited(), cwd=tmp_path)
        os.close(theirs)
        try:
            text = ""
            while "kcat -F" not in text:
                text += os.read(ours, 4096).decode()
            shown.append(text)
            process.terminate()
            assert process.wait(scaled(DEADLINE_S)) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)
    password = (tmp_path / "d/security/admin.password").read_text().strip()
    assert [password in text for text in shown] == [True, False]
    assert password not in (tmp_path / "log").read_text()


@pytest.mark.full
def test_a_broker_ends_with_its_terminal_and_reads_certificates_again_while_there_is_one(
    tmp_path: Path,
) -> None:
    address = f"127.0.0.1:{free_port()}"
    command = [*mansio_command(), "serve", "--secure", "--data", "d", "--kafka", address, "--http", ""]
    code = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
    ours, theirs = pty.openpty()
    output = tmp_path / "output"
    try:
        with output.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", code, *command],
                stdin=theirs,
                stdout=file,
                stderr=file,
                env=inherited(),
                cwd=tmp_path,
                start_new_session=True,
            )
        os.close(theirs)
        try:
            wait_until(lambda: "kcat -F" in output.read_text(), scaled(DEADLINE_S))
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: "tls_certificate_renewed" in output.read_text(), scaled(DEADLINE_S))
            assert process.poll() is None
        except BaseException:
            process.kill()
            raise
    finally:
        os.close(ours)
    try:
        assert process.wait(scaled(DEADLINE_S)) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.full
def test_open_listeners_beyond_loopback_are_refused_with_their_remedies_or_warned_of(tmp_path: Path) -> None:
    port, http_port = free_port(), free_port()
    kafka, http = f"0.0.0.0:{port}", f"0.0.0.0:{http_port}"
    serve = [*mansio_command(), "serve", "--data", str(tmp_path / "data")]
    command = [*serve, "--kafka", kafka, "--http", http]
    for refused_command, remedy in (
        (command, "--secure, or set insecure_listen=true"),
        ([*serve, "--kafka", f"127.0.0.1:{port}", "--http", http], "http_security_protocol=SASL_SSL, use an"),
    ):
        refused = subprocess.run(
            refused_command,
            capture_output=True,
            text=True,
            env=inherited(),
            timeout=scaled(DEADLINE_S),
            check=False,
        )
        assert (refused.returncode, refused.stdout) == (2, "")
        assert remedy in refused.stderr.splitlines()[-1]
        assert not (tmp_path / "data").exists()
    for number in (1, 2):
        log_file, output = tmp_path / f"log{number}", tmp_path / f"output{number}"
        with log_file.open("wb") as log, output.open("wb") as out:
            process = subprocess.Popen(
                [*command, "--set", "insecure_listen=true"], stdout=out, stderr=log, env=inherited()
            )
        try:
            wait_until(
                lambda path=output: " ready " in path.read_text(),
                scaled(DEADLINE_S),
                "the ready line",
            )
            metrics = httpx.get(f"http://127.0.0.1:{http_port}/metrics", timeout=scaled(20)).text
            assert "mansio_unprotected_listeners 2.0" in metrics
            process.terminate()
            assert process.wait(scaled(DEADLINE_S)) == 0
        finally:
            process.kill()
            process.wait()
        warned = [line for line in log_file.read_text().splitlines() if "insecure_listen" in line]
        assert len(warned) == 2
        for line, address in zip(warned, (kafka, http), strict=True):
            assert "WARN" in line
            assert f"address={address}" in line


ROLE_EXAMPLES = ("roles", "try-roles", "protocol-rights", "check")
"""Examples of the page about security that tests/system/cluster/test_roles_over_protocols.py runs."""

CERTIFICATES = "127.0.0.1:9094"
"""Address of the listener whose users are the certificates of clients."""


class SecurityBench(Bench):
    """The protected broker of the pages about security, and a user with contexts of their own."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        for name in ("MANSIO_BOOTSTRAP_SERVERS", "MANSIO_SQS_LISTENER", "MANSIO_GRPC_LISTENER"):
            del self.environment[name]
        self.environment["XDG_CONFIG_HOME"] = str(directory / "config")
        self.addresses[CERTIFICATES] = f"127.0.0.1:{free_port()}"


@pytest.mark.full
def test_examples_of_the_page_about_security_work_in_their_order(tmp_path: Path) -> None:
    required_tool("kcat")
    document = "docs/how-to/security.md"
    found = {name: example for name, example in examples(document).items() if name not in ROLE_EXAMPLES}
    with started(tmp_path, document, SecurityBench) as bench:
        bench.follow(found)
        new, old = (tmp_path / "alice.password"), found["mansio"]
        assert bench.run(old).code == 0
        new.write_text("wrong\n")
        refused = bench.run(old)
        assert refused.code == 1
        assert "refused user 'alice'" in refused.output
