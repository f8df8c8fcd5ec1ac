"""`mansio group`: list, describe, reset-offsets, delete.

Always true: offsets are moved only for a group without members (the broker refuses otherwise), and only within what
the log holds; `--dry-run` shows the same table and changes nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.common import DEFAULT_BROKER, BrokerOption, connect, parse_time, refuse, run
from mansio.cli.output import Output, OutputOption, cell, show_json, show_rows, show_table

if TYPE_CHECKING:
    from mansio.client import Client
    from mansio.client.types import TopicPartition

app = typer.Typer(no_args_is_help=True, help="See where consumer groups are, and move them.")

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group's id.")]

OFFSET_COLUMNS = ("topic", "partition", "committed", "end", "lag", "member")
RESET_COLUMNS = ("topic", "partition", "old", "new", "end")


@app.callback()
def noun() -> None:
    """See where consumer groups are, and move them."""


@app.command("list")
def list_groups(output: OutputOption = Output.TABLE, broker: BrokerOption = DEFAULT_BROKER) -> None:
    """List the groups."""

    async def work() -> list[dict[str, Any]]:
        async with connect(broker) as client:
            groups = await client.admin.list_groups()
        return [{"group": group.group, "state": group.state, "protocol_type": group.protocol_type} for group in groups]

    show_rows(output, run(work()), ["group", "state"], empty="no groups")
