"""Smoke test of an installed Mansio, from outside the repository: version, serve, publish and receive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mansio
from mansio.cli.support.build_commit import commit_of_checkout
from support.paths import ROOT
from support.process import served

if TYPE_CHECKING:
    from support.environments import Environment

PROGRAM = """
import pathlib, sys
import mansio

address, packages = sys.argv[1:]
assert pathlib.Path(mansio.__file__).is_relative_to(packages), mansio.__file__
with mansio.blocking.connect(address) as client:
    client.admin.create_topic("orders", partitions=1)
    client.admin.alter_group_config("billing", {"share.auto.offset.reset": "earliest"})
    client.publish("orders", b"2 apples", key=b"ann")
    with client.receive("orders", group="billing") as receiver:
        for message in receiver:
            if message.delivery_count == 1:
                message.retry(after=0)
                continue
            print(message.key, message.value, message.delivery_count)
            message.ack()
            break
"""


def check_version(environment: Environment) -> None:
    """Fail unless the installed package names its version and the commit that it was built from."""
    printed = environment.run("mansio", "--version")
    assert printed == f"mansio {mansio.__version__} ({commit_of_checkout(ROOT)})\n"


def check_installation(environment: Environment) -> None:
    """Fail unless the installed package serves, publishes and receives."""
    check_version(environment)
    with served(
        environment.place / "data",
        command=[str(environment.bin / "python"), "-m", "mansio"],
        environment=environment.variables,
    ) as broker:
        packages = str(environment.packages)
        printed = environment.run("python", "-c", PROGRAM, broker.bootstrap_servers, packages)
        assert printed == "b'ann' b'2 apples' 2\n"
        assert broker.stop() == 0
