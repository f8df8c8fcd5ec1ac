"""`mansio mcp`: a server of the Model Context Protocol on standard input and output, for agents.

* `answers`: the JSON texts of answers, and their bound. Pure.
* `shapes`: what of a result goes into an answer, and which of it is data of clients. Pure.
* `tools`: the tools, their parameters, and the requests that each sends.
* `server`: the protocol, with its SDK; the only module that imports it.

Invariants:
* Standard output carries the protocol and nothing else; there is no listener.
* Without --allow-changes no tool changes anything, without --show-values no answer has a key or a value of a record.
"""

from __future__ import annotations

from typing import Annotated

import typer

from mansio.cli.support.common import DEFAULT_BOOTSTRAP_SERVERS, BootstrapServersOption


def mcp(
    show_values: Annotated[
        bool,
        typer.Option("--show-values", help="Show keys, values and header values of records, marked as data."),
    ] = False,
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes",
            help="Also offer tools that redrive dead letters, and pause and resume schedules.",
        ),
    ] = False,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Serve the Model Context Protocol on standard input and output, so that an agent can ask about the cluster.

    Its tools list and describe topics, groups, schedules and dead letters, tell why a group waits, show the history of
    a record, hot partitions and the state of the cluster. They have the rights of the user of this command. An answer
    has at most 4 KB and names the command that shows more. It needs the extra `mcp`, opens no port, and ends with its
    standard input.
    """
    from mansio.host.extras import require_extra

    require_extra("mcp")
    from mansio.cli.mcp.server import serve

    serve(bootstrap_servers, shows_values=show_values, allows_changes=allow_changes)
