"""`mansio user` with a real broker: no password is an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import mansio
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with mansio.Broker(tmp_path / "data", listeners="127.0.0.1:0") as broker:
        yield Shell(broker.address)


def test_users_from_create_to_delete(shell: Shell, tmp_path: Path) -> None:
    assert shell("user", "list") == ""
    assert "no users" in shell.errors
    shell("user", "create", "alice", stdin=b"correct horse\n")
    file = tmp_path / "password"
    file.write_text("of bob\nnot this line\n")
    arguments = ("--password-file", str(file), "--mechanism", "SCRAM-SHA-512", "--iterations", "8192")
    shell("user", "create", "bob", *arguments)
    alice = {"user": "alice", "SCRAM-SHA-256": 4_096, "SCRAM-SHA-512": 4_096}
    bob = {"user": "bob", "SCRAM-SHA-256": None, "SCRAM-SHA-512": 8_192}
    assert shell.json("user", "list") == [alice, bob]
    assert "alice" in shell("user", "list")
    shell("user", "create", "alice", stdin=b"other\n", code=1)
    assert "already" in shell.errors
    shell("user", "set-password", "alice", "--previous-valid", "1h", "--password-file", "-", stdin=b"new")
    shell("user", "set-password", "nobody", stdin=b"new", code=1)
    assert "no user" in shell.errors
    shell("user", "delete", "alice", "nobody", code=1)
    assert "nobody" in shell.errors
    assert shell.json("user", "list") == [bob]


def test_api_keys_are_shown_once(shell: Shell) -> None:
    shell("user", "create", "alice", stdin=b"correct horse\n")
    key = shell(
        "user", "api-key", "create", "alice", "--description", "nightly", "--valid-for", "90d"
    ).strip()
    assert key.startswith("mansio_")
    (listed,) = shell.json("user", "api-key", "list", "alice")
    assert listed["id"] in key
    assert (listed["user"], listed["description"]) == ("alice", "nightly")
    assert key.rpartition("_")[2] not in str(listed)
    assert listed["expires"] > listed["created"]
    shell("user", "api-key", "create", "nobody", code=1)
    assert "no user" in shell.errors
    shell("user", "api-key", "delete", listed["id"])
    assert shell.json("user", "api-key", "list") == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "password", "code", "error"),
    [
        (["create", "a"], b"", 1, "a password has"),
        (["create", "a"], b"\xff", 2, "not UTF-8"),
        (["create", "a", "--iterations", "4095"], b"p", 2, "4096"),
        (["create", "a", "--mechanism", "PLAIN"], b"p", 2, "PLAIN"),
        (["create", " a"], b"p", 1, "spaces"),
        (["create", "ANONYMOUS"], b"p", 1, "reserved"),
        (["create", "a", "--password-file", "/nowhere"], b"", 1, "/nowhere"),
        (["create", "a", "--password", "p"], b"p", 2, "no such option"),
        (["set-password", "a", "--previous-valid", "soon"], b"p", 2, "duration"),
        (["set-password", "a", "--previous-valid", "400d"], b"p", 1, "valid for"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(
    shell: Shell, arguments: list[str], password: bytes, code: int, error: str
) -> None:
    shell("user", *arguments, stdin=password, code=code)
    assert error in shell.errors
