"""The member of etcd that a broker starts and looks after, with the real program on loopback."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import ssl
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from mansio.config.cluster import MemberAddress, parse_members
from mansio.config.settings import Settings
from mansio.errors import ConfigError, Unavailable
from mansio.host import child_process as children
from mansio.host.child_process import ChildProcess
from mansio.node.etcd_member.command import MemberPlan, TlsFiles, arguments
from mansio.node.etcd_member.executable import find_program
from mansio.node.etcd_member.member import EtcdMember, unhealthy_reason_of
from mansio.node.etcd_settings import create_own_member, etcd_config
from support.machine import scaled
from support.paths import free_port, required_tool
from support.waiting import eventually, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WAIT_S = 30.0


def address() -> MemberAddress:
    return MemberAddress("127.0.0.1", free_port(), free_port())


def member(directory: Path, own: MemberAddress, everybody: Sequence[MemberAddress] = ()) -> EtcdMember:
    plan = MemberPlan(own, tuple(everybody) or (own,), str(directory), "127.0.0.1")
    return EtcdMember(plan, find_program(required_tool("etcd")), first_pause_s=0.05)


def runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_member_is_healthy_when_start_returns_comes_back_when_killed_and_is_gone_after_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        one = member(tmp_path / "etcd", address())
        await one.start(scaled(WAIT_S))
        try:
            assert await unhealthy_reason_of(one.client_url) is None
            with pytest.raises(ConfigError, match="is in use by pid"):
                await member(tmp_path / "other", one.plan.own_address).start(scaled(WAIT_S))
            first = one.pid
            os.kill(first, signal.SIGKILL)
            await eventually(lambda: one.restarts == 1, WAIT_S)

            async def healthy() -> bool:
                return await one.unhealthy_reason() is None

            await eventually(healthy, WAIT_S)
            assert one.pid != first
            ended = next(record for record in caplog.records if record.message == "etcd_member_exited")
            assert vars(ended)["mansio_fields"]["ended"] == "killed by SIGKILL"
            last = one.pid
        finally:
            await one.stop()
        assert not runs(first)
        assert not runs(last)
        assert await unhealthy_reason_of(one.client_url) is not None

    asyncio.run(scenario())


def test_one_etcd_member_of_three_is_not_healthy_and_names_the_missing_members(tmp_path: Path) -> None:
    everybody = [address() for _ in range(3)]

    async def scenario() -> None:
        one = member(tmp_path / "etcd", everybody[0], everybody)
        with pytest.raises(Unavailable, match="2 of the 3 members have to run"):
            await one.start(0.5)
        assert not one.is_running
        assert not runs(one.pid)

    asyncio.run(scenario())


def test_a_member_that_cannot_run_reports_why_at_once(tmp_path: Path) -> None:
    (tmp_path / "etcd" / "data").mkdir(parents=True)
    (tmp_path / "etcd" / "data" / "member").write_text("in the way")

    async def scenario() -> None:
        one = member(tmp_path / "etcd", address())
        with pytest.raises(ConfigError, match=r"exited at once: .*not a directory"):
            await one.start(scaled(WAIT_S))

    asyncio.run(scenario())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can tie a process to its parent")
def test_a_child_does_not_outlive_its_parent_not_even_a_sigkill(tmp_path: Path) -> None:
    code = f"""
        import asyncio, os, signal, sys
        from mansio.host.child_process import ChildProcess
        sleeping = "import time; print('up', flush=True); time.sleep(600)"
        async def main():
            child = ChildProcess([sys.executable, "-c", sleeping], {str(tmp_path / "log")!r})
            await child.start()
            while "up" not in child.output(): await asyncio.sleep(0.01)
            print(child.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=scaled(30),
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until(lambda: not runs(int(done.stdout)), 10, "the child is gone")


def test_a_child_that_ignores_sigterm_is_killed_after_the_wait(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )

    async def scenario() -> None:
        child = ChildProcess([sys.executable, "-c", code], str(tmp_path / "log"))
        await child.start()
        await eventually(lambda: "deaf" in child.output())
        assert await child.stop(0.1) == -signal.SIGKILL
        assert not runs(child.pid)

    asyncio.run(scenario())


def test_the_log_of_a_child_is_bounded_and_keeps_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "LOG_BYTES_MAX", 1000)
    monkeypatch.setattr(children, "LOG_BYTES_KEPT", 100)
    log = tmp_path / "log"

    async def scenario() -> None:
        code = "print('x' * 2000 + 'end')"
        child = ChildProcess([sys.executable, "-c", code], str(log))
        await child.start()
        await child.wait()
        child.trim_log()
        assert log.stat().st_size == 0
        assert (tmp_path / "log.1").read_text() == "x" * 96 + "end\n"

    asyncio.run(scenario())


def ask(url: str, call: str, **fields: object) -> dict[str, Any]:
    """A call of etcd's JSON gateway, tried again until it is answered well: a member that has just come is not trusted
    with changes for its first seconds."""
    import urllib.error
    import urllib.request

    def answer() -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(
                f"{url}/v3/{call}", json.dumps(fields).encode(), timeout=scaled(5)
            ) as response:
                return dict(json.load(response))
        except urllib.error.HTTPError:
            return None

    return wait_until(answer, WAIT_S, call)


def certificates(directory: Path) -> TlsFiles:
    """A certificate for loopback, and who vouches for it."""
    openssl = required_tool("openssl")
    files = TlsFiles(*(str(directory / name) for name in ("ca.pem", "cert.pem", "key.pem")))
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=mansio-test"]
    usage = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "extendedKeyUsage=serverAuth,clientAuth"]
    ca_key = str(directory / "ca.key")
    signed = ["-CA", files.ca_file, "-CAkey", ca_key, *usage, "-addext", "basicConstraints=critical,CA:FALSE"]
    for command in (
        ["-keyout", ca_key, "-out", files.ca_file],
        [*signed, "-keyout", files.key_file, "-out", files.cert_file],
    ):
        subprocess.run(
            [openssl, "req", "-x509", *new_key, "-days", "2", *command],
            check=True,
            capture_output=True,
            timeout=scaled(30),
        )
    return files


def test_with_certificates_no_client_without_one_is_answered(tmp_path: Path) -> None:
    tls = certificates(tmp_path)

    async def scenario() -> None:
        own = address()
        plan = MemberPlan(own, (own,), str(tmp_path / "etcd"), "127.0.0.1", tls=tls)
        one = EtcdMember(plan, find_program(required_tool("etcd")))
        await one.start(scaled(WAIT_S))
        try:
            assert one.client_url.startswith("https://")
            assert await one.unhealthy_reason() is None
            stranger = ssl.create_default_context(cafile=tls.ca_file)
            assert await unhealthy_reason_of(one.client_url, stranger) is not None
            assert await unhealthy_reason_of(own.client_url("http")) is not None
        finally:
            await one.stop()

    asyncio.run(scenario())


# -- the program --------


def program(directory: Path, version: str) -> str:
    path = directory / "etcd"
    path.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("version", ["3.5.0", "3.5.2", "3.3.27", "soon"])
def test_a_version_that_loses_data_or_is_too_old_is_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(ConfigError, match=f"is etcd {version}, too old or known to lose data"):
        find_program(program(tmp_path, version))


@pytest.mark.parametrize(
    ("version", "warned"), [("3.5.12", True), ("3.4.23", True), ("3.5.13", False), ("3.6.1", False)]
)
def test_an_old_version_is_a_warning(
    tmp_path: Path, version: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_program(program(tmp_path, version)).version == version
    assert ("etcd_version_old" in caplog.messages) is warned


def test_a_missing_program_and_one_that_is_not_etcd_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a program"):
        find_program(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="is not etcd"):
        find_program("/bin/true")


def test_the_program_in_path_comes_before_the_unpacked_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_program(program(tmp_path, "3.6.0")).path == str(tmp_path / "etcd")


# -- the command line --------


def test_the_command_line_listens_on_one_address_and_is_the_same_list_for_everybody() -> None:
    members = parse_members("c,a:2390/2391,b")
    given = [
        dict(argument[2:].split("=", 1) for argument in arguments(MemberPlan(own, members, "d", "10.0.0.9")))
        for own in members
    ]
    assert given[0]["listen-client-urls"] == "http://10.0.0.9:2391"
    assert given[0]["listen-peer-urls"] == "http://10.0.0.9:2390"
    assert given[0]["advertise-client-urls"] == "http://a:2391"
    assert len({one["initial-cluster"] for one in given}) == 1
    assert len({one["initial-cluster-token"] for one in given}) == 1
    assert given[0]["initial-cluster"] == "a-2390=http://a:2390,b-2380=http://b:2380,c-2380=http://c:2380"
    secure = arguments(MemberPlan(members[0], members, "d", "10.0.0.9", tls=TlsFiles("ca", "cert", "key")))
    assert not [argument for argument in secure if "http://" in argument]
    assert {"--client-cert-auth=true", "--peer-client-cert-auth=true"} <= set(secure)


def test_from_settings_to_the_member_and_the_client(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("open sesame\n")
    config = etcd_config(
        Settings(etcd_endpoints="http://127.0.0.1:2379", etcd_user="broker", etcd_password_file=str(password))
    )
    assert (config.endpoints, config.user, config.password) == (
        ("http://127.0.0.1:2379",),
        "broker",
        "open sesame",
    )
    with pytest.raises(ConfigError, match="etcd_password_file: cannot read"):
        etcd_config(
            Settings(
                etcd_endpoints="http://127.0.0.1:1", etcd_user="x", etcd_password_file=str(tmp_path / "no")
            )
        )
    settings = Settings(
        etcd_join="localhost:2480/2479,elsewhere",
        etcd_member="localhost:2480",
        data_dir=str(tmp_path),
        etcd_binary=program(tmp_path, "3.6.0"),
    )
    made = asyncio.run(create_own_member(settings))
    assert made.plan.listen_host in ("127.0.0.1", "::1")
    assert made.plan.directory == f"{tmp_path}/etcd"
    assert settings.etcd_urls == ("http://localhost:2479", "http://elsewhere:2379")
