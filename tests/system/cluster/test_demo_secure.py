"""`mansio demo --secure`: the demonstration with a protected cluster, and its checks, which notice an open broker."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mansio
from mansio_demo import security_checks
from mansio_demo.broker_process import BrokerProcess
from support.machine import scaled
from support.paths import required_tool
from support.present import present
from support.process import inherited


@pytest.mark.full
@pytest.mark.row("A8")
def test_the_demo_holds_with_tls_users_and_three_brokers() -> None:
    required_tool("etcd")
    command = [sys.executable, "-m", "mansio.cli.main", "demo", "broker", "--secure", "--count", "20000"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=inherited(), timeout=scaled(120), check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for row in (
        "nothing acknowledged is lost  SIGKILL under load, acks=all       0 of 20,000",
        "TLS at every broker           clients without TLS             3 of 3 refused",
        "only users get in             no user, wrong passwords        9 of 9 refused",
        "rights decide                 a user without ACLs             9 of 9 refused",
        "etcd asks for certificates    clients without one             2 of 2 refused",
        "replication over TLS          no listener without TLS         6 of 6 in sync",
    ):
        assert row in done.stdout, done.stdout
    assert "broker 1 of 3" in done.stdout
    assert "NO:" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_broker_that_lets_a_client_in_is_counted_as_one_that_does_not_refuse(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path / "data", listeners="127.0.0.1:0") as broker:
        ways = ({"tls": False, "user": ""}, {"tls": True, "user": ""})
        assert asyncio.run(security_checks._refused([broker.address], ways)) == (1, 2)


@pytest.mark.full
def test_clients_of_a_secure_broker_find_its_password_in_the_environment_and_the_broker_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANSIO_USER", "somebody")
    monkeypatch.setenv("MANSIO_PASSWORD", "the password of somebody")
    with BrokerProcess(str(tmp_path / "data"), is_secure=True) as process:
        process.start()
        password = (tmp_path / "data/security/admin.password").read_text().strip()
        assert (os.environ["MANSIO_USER"], os.environ["MANSIO_PASSWORD"]) == ("admin", password)

        async def log_in() -> None:
            async with mansio.connect(process.kafka) as client:
                assert len((await client.admin.describe_cluster()).brokers) == 1

        asyncio.run(log_in())
        if sys.platform == "linux":
            environment = Path(f"/proc/{present(process._process).pid}/environ").read_bytes()
            assert b"PATH=" in environment
            assert b"the password of somebody" not in environment
        assert process.stop() == 0
    assert os.environ["MANSIO_USER"] == "somebody"
    assert os.environ["MANSIO_PASSWORD"] == "the password of somebody"
