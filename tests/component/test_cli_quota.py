"""`mansio quota` with a real broker."""

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


def test_quotas_from_set_to_delete(shell: Shell) -> None:
    assert shell("quota", "list") == ""
    assert "no quotas" in shell.errors
    shell("quota", "set", "--client", "loader", "--producer-byte-rate", "1000")
    shell("quota", "set", "--client", "loader", "--consumer-byte-rate", "2000")
    shell("quota", "set", "--default-client", "--user", "ANONYMOUS", "-w", "3000")
    shell("quota", "set", "--default-client", "--user", "ANONYMOUS", "--controller-mutation-rate", "2.5")
    named = {
        "user": None,
        "default_user": False,
        "client": "loader",
        "default_client": False,
        "ip": None,
        "default_ip": False,
        "producer_byte_rate": 1000,
        "consumer_byte_rate": 2000,
        "controller_mutation_rate": None,
        "connection_creation_rate": None,
    }
    default = {
        "user": "ANONYMOUS",
        "default_user": False,
        "client": None,
        "default_client": True,
        "ip": None,
        "default_ip": False,
        "producer_byte_rate": 3000,
        "consumer_byte_rate": None,
        "controller_mutation_rate": 2.5,
        "connection_creation_rate": None,
    }
    assert sorted(shell.json("quota", "list"), key=lambda row: row["default_client"]) == [named, default]
    table = shell("quota", "list")
    assert "(default)" in table
    assert "loader" in table

    shell("quota", "delete", "--client", "loader")
    assert shell.json("quota", "list") == [default]
    shell("quota", "delete", "--client", "loader", code=1)
    assert "no quotas" in shell.errors
    shell("quota", "delete", "--default-client", "--user", "ANONYMOUS")
    shell("quota", "set", "--default-ip", "--connection-creation-rate", "1000")
    (of_addresses,) = shell.json("quota", "list")
    assert of_addresses["default_ip"]
    assert of_addresses["connection_creation_rate"] == 1000
    shell("quota", "delete", "--default-ip")
    assert shell.json("quota", "list") == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("set", "-w", "5"), 2),
        (("set", "--client", "a"), 2),
        (("set", "--client", "a", "--default-client", "-w", "5"), 2),
        (("set", "--client", "a", "-w", "0"), 2),
        (("delete",), 2),
        (("set", "--user", "", "-w", "5"), 1),
    ],
)
def test_a_quota_that_means_nothing_is_refused(shell: Shell, arguments: tuple[str, ...], code: int) -> None:
    shell("quota", *arguments, code=code)
    assert shell.json("quota", "list") == []
