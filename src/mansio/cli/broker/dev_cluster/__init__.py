"""`mansio dev-cluster`: etcd and several brokers on this machine.

`plan` chooses ports and stores them with the data, `processes` starts and stops the processes, `restarts` decides which
brokers are restarted, and `protection` makes what `--secure` needs. This module defines the command.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from functools import partial
from typing import Annotated

import typer

from mansio.cli.support.common import parse_name_values, usage_error

BROKERS_MAX = 16

BrokersOption = Annotated[
    int, typer.Option("--brokers", min=1, max=BROKERS_MAX, metavar="N", help="Number of brokers.")
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Directory of data and ports, reused by the next run. [default: a temporary directory]",
    ),
]
MembersOption = Annotated[
    int,
    typer.Option("--etcd-members", min=1, max=5, metavar="N", help="Number of etcd members: 1, 3 or 5."),
]
FirstPortOption = Annotated[
    int | None,
    typer.Option(
        "--first-port",
        min=1024,
        max=65_000,
        metavar="PORT",
        help="Kafka port of the first broker; the others follow. [default: free ports]",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting of every broker by its name; repeatable."),
]

SecureOption = Annotated[
    bool,
    typer.Option(
        "--secure",
        help="TLS between all processes, and users who log in: make an authority, certificates and the user admin in "
        "DIR/security at the first start, and print how to connect; needs the extra secure.",
    ),
]
NoRestartOption = Annotated[
    bool, typer.Option("--no-restart", help="Do not restart brokers, to practise a failure.")
]


def dev_cluster(
    brokers: BrokersOption = 3,
    data: DataOption = None,
    etcd_members: MembersOption = 1,
    first_port: FirstPortOption = None,
    set_: SetOption = None,
    no_restart: NoRestartOption = False,
    secure: SecureOption = False,
) -> None:
    """Run a cluster on this machine until SIGTERM or Ctrl-C: etcd, and a process per broker.

    Progress goes to standard error. One line with `ready` and all addresses is printed when topics with replicas on
    every broker can be created. Brokers run with `serve --dev`: topics are created on first use. A broker that exits is
    restarted, at most five times a minute. A broker that was stopped or whose disk failed is not restarted; the command
    that starts it again is printed. A temporary directory is removed at the end unless a broker still uses it. With
    --secure clients log in over TLS, brokers connect to each other with TLS, and etcd asks for certificates. For
    development and tests: everything is on one disk.
    """
    from mansio.host.extras import require_extra
    from mansio.host.platforms import require_posix

    require_posix("mansio dev-cluster")
    settings = dict(parse_name_values(set_ or (), "--set"))
    if etcd_members % 2 == 0:
        usage_error(
            f"{etcd_members} tolerate no more failures than {etcd_members - 1}; use 1, 3 or 5",
            "--etcd-members",
        )
    _check_settings_option(settings, is_protected=secure)
    if secure:
        require_extra("secure")
    run = partial(
        _run,
        brokers=brokers,
        etcd_members=etcd_members,
        first_port=first_port,
        settings=settings,
        restart=not no_restart,
        is_protected=secure,
    )
    if data is not None:
        raise typer.Exit(run(data))
    directory = tempfile.mkdtemp(prefix="mansio-dev-cluster-")
    try:
        code = run(directory)
    finally:
        _remove_unless_in_use(directory)
    raise typer.Exit(code)


def _remove_unless_in_use(directory: str) -> None:
    """Remove the temporary directory. If a broker that the user started again uses it, keep it and print a message."""
    from mansio.cli.broker.dev_cluster.plan import data_directories_in_use

    in_use = data_directories_in_use(directory)
    if in_use:
        print(f"{directory} is kept: {', '.join(in_use)} is in use by another process", file=sys.stderr)
    else:
        shutil.rmtree(directory, ignore_errors=True)


def _check_settings_option(settings: dict[str, str], *, is_protected: bool) -> None:
    from mansio.cli.broker.dev_cluster.plan import check_settings
    from mansio.errors import ConfigError

    try:
        check_settings(settings, is_protected=is_protected)
    except ConfigError as error:
        usage_error(error.message.removesuffix(" (from the flag)"), "--set")


def _run(
    directory: str,
    *,
    brokers: int,
    etcd_members: int,
    first_port: int | None,
    settings: dict[str, str],
    restart: bool,
    is_protected: bool,
) -> int:
    import asyncio
    import logging

    from mansio import logs
    from mansio.cli.broker.dev_cluster.plan import plan_cluster
    from mansio.cli.broker.dev_cluster.processes import run_until_stopped

    logs.set_up("warning", "text")
    logging.getLogger("mansio.net").setLevel(
        logging.CRITICAL
    )  # brokers that have not started yet are expected
    os.makedirs(directory, exist_ok=True)
    plan = plan_cluster(
        os.path.abspath(directory),
        brokers=brokers,
        members=etcd_members,
        first_port=first_port,
        settings=settings,
        is_protected=is_protected,
    )
    protection = None
    if is_protected:
        from mansio.cli.broker.dev_cluster.protection import ClusterProtection

        protection = ClusterProtection(plan)
        protection.prepare_files()
    return asyncio.run(run_until_stopped(plan, restart=restart, protection=protection))
