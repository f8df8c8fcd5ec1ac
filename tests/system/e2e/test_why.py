"""`mansio why` with a broker and members that are processes of their own: one is paused, goes on, leaves."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

import mansio.blocking
from support.machine import scaled
from support.present import present
from support.process import ServedBroker
from support.waiting import wait_until
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from pathlib import Path

GROUP = "couriers"


def cause(shell: Shell) -> Any:
    findings = shell.json("why", GROUP)["findings"]
    return findings[0]["cause"] if findings else None


@pytest.mark.full
@pytest.mark.row("T8")
def test_a_member_is_followed_from_its_pause_to_its_end(tmp_path: Path) -> None:
    """The pause is named in the second half of its session timeout, before the session ends."""
    broker = ServedBroker(tmp_path / "data")
    try:
        shell = Shell(broker.start().bootstrap_servers)
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.create_topic("parcels", partitions=1)
            settings = {"consumer.session.timeout.ms": "14000", "consumer.heartbeat.interval.ms": "500"}
            client.admin.alter_group_config(GROUP, settings)
            client.admin.reset_offsets(GROUP, ["parcels"], to=0)
            with shell.start("consume", "parcels", "--group", GROUP) as member:
                client.publish("parcels", b"1")
                assert present(member.stdout).readline() == b"1\n"
                member.send_signal(signal.SIGSTOP)
                try:
                    client.publish("parcels", b"2")
                    wait_until(lambda: cause(shell) == "stopped-member", what="the paused member is named")
                finally:
                    member.send_signal(signal.SIGCONT)
                wait_until(lambda: cause(shell) is None, what="the member goes on")
                assert present(member.stdout).readline() == b"2\n"
                member.send_signal(signal.SIGINT)
                member.wait(scaled(30))
            client.publish("parcels", b"3")
            wait_until(lambda: cause(shell) == "no-member", what="the end of the member")
            (finding,) = shell.json("why", GROUP)["findings"]
            assert finding["command"] == f"mansio consume parcels --group {GROUP}"
            # What the command starts is what helps.
            words = finding["command"].split()[1:]
            assert shell(*words, "--max", str(finding["records"])).splitlines()[-1] == "3"
    finally:
        broker.kill()
