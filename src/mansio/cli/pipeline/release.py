"""`mansio pipeline release NAME`: removes the retention holds of a pipeline that will not run again.

Invariants:
* Only committed offsets with a retention hold are deleted. The deletion is durable when the command ends.
* A running pipeline sets its holds again with its next commit. A later run resumes from its checkpoint or table.
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
from mansio.wire.internal_records.hold_metadata import (
    parse_hold_metadata,
    pipeline_group_id,
    pipeline_name_of,
)

if TYPE_CHECKING:
    from mansio.client import Client

RELEASE_COLUMNS = ("topic", "partition", "committed", "end", "held")


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("release")(release)


def release(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pipeline's name.")],
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Remove the retention holds of a pipeline, so that deletion and compaction continue.

    Deletes and shows the committed offsets with holds; `held` is the number of records they retained. For a pipeline
    that will not run again: a running one sets its holds again with its next commit.
    """

    async def work() -> list[dict[str, Any]]:
        async with connect(bootstrap_servers) as client:
            return await _release(client, name, dry_run=dry_run)

    show_rows(output, run(work()), RELEASE_COLUMNS, empty=f"pipeline {name} holds nothing")


async def _release(client: Client, name: str, *, dry_run: bool) -> list[dict[str, Any]]:
    group = pipeline_group_id(name)
    offsets = await client.admin.group_offsets(group)
    if not offsets:
        raise GroupIdNotFound(await _unknown_pipeline_message(client, name))
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


async def _unknown_pipeline_message(client: Client, name: str) -> str:
    """Return the error message for an unknown pipeline, with the names of the known pipelines."""
    try:
        groups = [group.group_id for group in await client.admin.list_groups()]
    except MansioError:
        groups = []
    known = [found for group in groups if (found := pipeline_name_of(group)) is not None]
    return f"there is no pipeline {name!r}" + (f"; there are {', '.join(known[:20])}" if known else "")
