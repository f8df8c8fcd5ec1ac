"""`mansio pipeline release NAME`: a pipeline that will not run again gives up what it holds back.

Always true: only offsets that hold records back are forgotten, and the broker has stored that when the command ends. A
pipeline that still runs holds again with its next commit; the truth of where it restarts is in its checkpoint or table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    DryRunOption,
    connect,
    run,
)
from mansio.cli.support.formatting import Output, OutputOption, show_rows
from mansio.errors import GroupIdNotFound, MansioError
from mansio.wire.internal_records.hold_metadata import parse_hold_metadata, pipeline_group, pipeline_of

if TYPE_CHECKING:
    from mansio.client import Client

COLUMNS = ("topic", "partition", "committed", "end", "held")


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("release")(release)


def release(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pipeline's name.")],
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Let deletion and compaction go on as if a pipeline did not exist.

    Forgets the committed offsets that hold records back for it, and shows them; `held` is how many records
    that is. For a pipeline that will not run again: one that still runs holds again with its next commit.
    """

    async def work() -> list[dict[str, Any]]:
        async with connect(bootstrap_servers) as client:
            return await _release(client, name, dry_run=dry_run)

    show_rows(output, run(work()), COLUMNS, empty=f"pipeline {name} holds nothing")


async def _release(client: Client, name: str, *, dry_run: bool) -> list[dict[str, Any]]:
    group = pipeline_group(name)
    offsets = await client.admin.group_offsets(group)
    if not offsets:
        raise GroupIdNotFound(await _unknown(client, name))
    held = [place for place, committed in sorted(offsets.items()) if parse_hold_metadata(committed.metadata)]
    lags = await client.admin.group_lag(group)
    rows = []
    for place in held:
        end = lags[place].end_offset if place in lags else None
        committed = offsets[place].offset
        rows.append(
            {
                "pipeline": name,
                "topic": place.topic,
                "partition": place.partition,
                "committed": committed,
                "end": end,
                "held": None if end is None else max(0, end - committed),
                "released": not dry_run,
            }
        )
    if held and not dry_run:
        await client.admin.delete_offsets(group, held)
    return rows


async def _unknown(client: Client, name: str) -> str:
    """That there is no such pipeline, and which there are."""
    try:
        groups = [group.group_id for group in await client.admin.list_groups()]
    except MansioError:
        groups = []
    known = [found for group in groups if (found := pipeline_of(group)) is not None]
    return f"there is no pipeline {name!r}" + (f"; there are {', '.join(known[:20])}" if known else "")
