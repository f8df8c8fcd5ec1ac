"""`mansio why GROUP`: names in one line what keeps a group from going on, with the command that helps."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    connect,
    parse_duration_s,
    run,
    usage_error,
)
from mansio.cli.support.formatting import Output, OutputOption, count_text, printable, show_json

if TYPE_CHECKING:
    from mansio.client import Client
    from mansio.client.admin.explanations import GroupExplanation, GroupFinding

SAMPLE_S_MAX = 10
"""Longest sample that a broker takes."""


def why(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group's id.")],
    sample: Annotated[
        str,
        typer.Option(
            "--sample",
            metavar="DURATION",
            help="For how long to look at what changes, for example 5s; 0s to look once.",
        ),
    ] = "1s",
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Tell what keeps a group from going on, and the command that helps.

    The first line is the answer, for a consumer group and a share group alike: no member, a stopped member, a record
    that fails again and again, a key in flight, all locks taken, an open transaction, delayed records only, a paused
    schedule, a partition without leader, a hot partition, a quota, a slow handler, a denied ACL, and others. If nothing
    blocks the group, it says how fast it goes on.
    """
    sample_s = parse_duration_s(sample, "--sample")
    if not 0 <= sample_s <= SAMPLE_S_MAX:
        usage_error(f"{sample}: 0s to {SAMPLE_S_MAX}s", "--sample")

    async def work() -> GroupExplanation:
        async with connect(bootstrap_servers) as client:
            return await explain(client, group, sample_s)

    found = run(work())
    if output is Output.JSON:
        show_json(json_of(found))
    else:
        show(found)


async def explain(client: Client, group: str, sample_s: float) -> GroupExplanation:
    """Return what keeps a group from going on."""
    return await client.admin.explain_group(group, sample=sample_s)


def show(found: GroupExplanation) -> None:
    """Print the answer, what helps, and the other findings."""
    print(found.summary)
    for number, each in enumerate(found.findings):
        if number == 1:
            print("\nalso:")
        if number:
            print(f"{_kind(each)}: {each.text}")
        elif not each.is_certain:
            print("  (likely: numbers suggest it)")
        print(f"  {each.advice}:")
        print(f"  {each.command}")
    if found.more_findings:
        print(f"\n{count_text(found.more_findings, 'finding')} more")


def _kind(finding: GroupFinding) -> str:
    return f"{finding.cause} ({finding.impact}{'' if finding.is_certain else ', likely'})"


def json_of(found: GroupExplanation) -> dict[str, Any]:
    """Return the answer as the JSON output has it."""
    fields = asdict(found)
    fields["group"] = fields.pop("group_id")
    for each in fields["findings"]:
        each["key"] = None if each["key"] is None else printable(each["key"])
    return fields
