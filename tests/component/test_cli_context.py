"""`mansio context`, and commands that connect with TLS and a password."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING

import pytest

from mansio.cli.broker import doctor
from mansio.cli.broker.doctor import check_broker
from mansio.cli.support import common
from mansio.net.security_settings import VARIABLES
from support.certificates import Authority
from support.machine import scaled
from support.secure_front import SecureFront, server_context
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USER, PASSWORD = "alice", "pass word"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def front(authority: Authority) -> Iterator[SecureFront]:
    with SecureFront(server_context(authority.issue()), {USER: PASSWORD}) as running:
        yield running


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Shell("")


@pytest.fixture
def password_file(tmp_path: Path) -> str:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    return str(path)


def broker_check(shell: Shell, code: int = 0) -> dict[str, str]:
    """The line of `mansio doctor` about the broker."""
    checks = json.loads(shell("doctor", "--output", "json", code=code))
    return next(one for one in checks if one["check" if "check" in one else "name"] == "broker")


def test_commands_connect_as_the_current_context_states(
    front: SecureFront, authority: Authority, shell: Shell, password_file: str, tmp_path: Path
) -> None:
    where = ("-b", front.address, "--ca", str(authority.certificate))
    shell("context", "add", "other", "-b", "other.example:1")
    shell("context", "add", "here", *where, "--user", USER, "--password-file", password_file)
    shell("context", "use", "here")
    assert shell.json("context", "list") == [
        {
            "current": True,
            "name": "here",
            "bootstrap_servers": front.address,
            "protocol": "SASL_SSL",
            "user": USER,
        },
        {
            "current": False,
            "name": "other",
            "bootstrap_servers": "other.example:1",
            "protocol": "PLAINTEXT",
            "user": None,
        },
    ]
    assert PASSWORD not in shell("context", "list")
    stored = tmp_path / "config" / "mansio" / "contexts.toml"
    assert stat.S_IMODE(os.stat(stored).st_mode) == 0o600

    shell("produce", "greetings", stdin=b"hello\n")
    assert shell("consume", "greetings", "--from-beginning", "--max", "1") == "hello\n"
    assert shell.json("topic", "list", "-b", front.address)  # the address of a context stands for the context
    assert broker_check(shell)["detail"].endswith(f"SASL_SSL as {USER}")

    shell("context", "remove", "here")
    assert [one["name"] for one in shell.json("context", "list")] == ["other"]
    assert PASSWORD not in stored.read_text()


@pytest.mark.full
def test_the_environment_and_standard_input_give_a_password(
    front: SecureFront, authority: Authority, shell: Shell
) -> None:
    arguments = ("-b", front.address, "--ca", str(authority.certificate), "--user", USER)
    shell("context", "add", "here", *arguments, code=2)
    assert "--password-file" in shell.errors
    shell("context", "add", "here", *arguments, "--password-file", "-", stdin=PASSWORD.encode())
    assert shell.json("cluster", "status")
    shell.environment |= {"MANSIO_PASSWORD": "wrong"}
    shell("cluster", "status", code=1)
    assert f"refused user '{USER}'" in shell.errors
    shell("context", "remove", "here")
    shell.environment |= {
        "MANSIO_BOOTSTRAP_SERVERS": front.address,
        "MANSIO_TLS": str(authority.certificate),
        "MANSIO_USER": USER,
        "MANSIO_PASSWORD": PASSWORD,
    }
    assert shell.json("cluster", "status")


@pytest.mark.full
def test_a_file_of_contexts_that_others_may_read_is_refused(shell: Shell, tmp_path: Path) -> None:
    shell("context", "add", "here", "-b", "127.0.0.1:1")
    os.chmod(tmp_path / "config" / "mansio" / "contexts.toml", 0o644)
    for command in (("context", "list"), ("topic", "list"), ("topic", "list", "-b", "127.0.0.1:1")):
        shell(*command, code=1)
        assert "chmod 600" in shell.errors


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ("use", "missing"),
        ("remove", "missing"),
        ("add", "here", "-b", "127.0.0.1:1", "--ca", "/missing.pem"),
        ("add", "here", "-b", "127.0.0.1:1", "--tls", "--certificate", "/missing.pem"),
        ("add", "here", "-b", "a b"),
    ],
)
def test_what_cannot_be_used_is_not_stored(arguments: tuple[str, ...], shell: Shell) -> None:
    shell("context", *arguments, code=1)
    assert shell.errors.startswith("mansio: ")
    assert len(shell.errors.splitlines()) == 1
    assert shell.json("context", "list") == []


@pytest.mark.full
def test_a_context_is_replaced_only_on_request(shell: Shell) -> None:
    shell("context", "add", "here", "-b", "127.0.0.1:1")
    shell("context", "add", "here", "-b", "127.0.0.1:2", code=2)
    shell("context", "add", "here", "-b", "127.0.0.1:2", "--replace")
    assert shell.json("context", "list")[0]["bootstrap_servers"] == "127.0.0.1:2"
    shell("context", "add", "not a name", "-b", "127.0.0.1:1", code=2)


@pytest.mark.full
@pytest.mark.usefixtures("shell")
def test_doctor_names_the_part_that_is_wrong(
    front: SecureFront, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        SecureFront() as plain,
        SecureFront(server_context(authority.issue("other", names=["DNS:other.example"]))) as other,
        SecureFront(server_context(authority.issue("expired", days=-1))) as expired,
        SecureFront(server_context(authority.issue(), client_authority=str(authority.certificate))) as mutual,
    ):
        monkeypatch.setattr(doctor, "CONNECT_TIMEOUT_MS", scaled(2.0) * 1000)
        monkeypatch.setattr(common, "CONNECT_TIMEOUT_MS", scaled(2.0) * 1000)
        right = {"MANSIO_TLS": str(authority.certificate), "MANSIO_USER": USER, "MANSIO_PASSWORD": PASSWORD}
        for wrong, servers, variables in (
            ("name", "no-such-host.invalid:9092", right),
            ("port", "127.0.0.1:1", right),
            ("protocol", plain.broker.bootstrap_servers, right),
            ("protocol", front.address, {}),
            ("certificate", front.address, {**right, "MANSIO_TLS": "true"}),
            ("certificate", expired.address, right),
            ("name", other.address, right),
            ("client certificate", mutual.address, right),
            ("user or password", front.address, {**right, "MANSIO_PASSWORD": "wrong"}),
            ("user or password", front.address, {**right, "MANSIO_USER": "nobody"}),
            ("user", front.address, {"MANSIO_TLS": str(authority.certificate)}),
            ("settings", front.address, {**right, "MANSIO_TLS": "/missing.pem"}),
        ):
            for variable in VARIABLES.values():
                monkeypatch.delenv(variable, raising=False)
            for variable, text in variables.items():
                monkeypatch.setenv(variable, text)
            detail = check_broker(servers).detail
            assert detail.startswith((f"{wrong} wrong: ", f"{wrong}: ")), (servers, detail)
            assert PASSWORD not in detail
