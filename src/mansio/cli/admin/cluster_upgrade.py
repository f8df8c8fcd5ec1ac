"""`mansio cluster finalize`: the end of the upgrade of a cluster, after which its brokers may write what the version
before does not know.

Invariant: the brokers decide whether the feature level can be raised; the command shows why, and asks for confirmation
(`--yes` or a prompt).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    DryRunOption,
    YesOption,
    confirm,
    connect,
    print_error,
    run,
)
from mansio.cli.support.formatting import Output, OutputOption, show_json, show_rows

if TYPE_CHECKING:
    from mansio.client.admin.cluster import BrokerStatus, ClusterFeatures

LOOKS_MAX: Final = 50
"""Looks at the brokers after the level was raised."""
POLL_S: Final = 0.2
"""Pause between two looks."""
COLUMNS: Final = ("broker", "address", "state", "version", "levels")
POSSIBLE: Final = (
    "users, access control lists, API keys, tokens and listeners that authenticate their clients",
    "transactions",
    "delays, schedules, deduplication, priorities and order by key, and queues of SQS",
    "moves of partitions",
)
"""What a cluster can do from the level of this version on."""


def finalize(
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """End the upgrade of a cluster: raise its feature level to that of this version.

    Shows the level, and the version of each broker, first. Refused while a registered broker runs an older version, or
    ran it last. Afterwards brokers of the older version cannot be started in this cluster any more: there is no way
    back. Without effect if the cluster has the level already, as every new cluster does.
    """
    from mansio.metadata.feature_level import CURRENT_LEVEL, RELEASES

    features, brokers = run(_read(bootstrap_servers))
    is_due = features.level < CURRENT_LEVEL
    if output is Output.JSON:
        show_json(
            {"level": features.level, "level_after": CURRENT_LEVEL, "brokers": _rows(features, brokers)}
        )
    else:
        _show(features, brokers, is_due=is_due)
    if not is_due:
        return
    if older := [one for one in features.brokers if one.error is None and one.highest < CURRENT_LEVEL]:
        names = ", ".join(str(one.node_id) for one in older)
        raise typer.Exit(print_error(f"upgrade all brokers first; of an older version: {names}"))
    run(_raise_level(bootstrap_servers, CURRENT_LEVEL, dry_run=True))
    if dry_run:
        print(f"mansio: all brokers support level {CURRENT_LEVEL}", file=sys.stderr, flush=True)
        return
    effect = (
        f"feature level {features.level} -> {CURRENT_LEVEL}: brokers of versions before {RELEASES[CURRENT_LEVEL]} "
        "cannot be started in this cluster any more"
    )
    confirm(effect, is_sure=yes)
    run(_raise_level(bootstrap_servers, CURRENT_LEVEL, dry_run=False))
    print(f"mansio: the feature level is {CURRENT_LEVEL}", file=sys.stderr, flush=True)


async def _read(bootstrap_servers: str) -> tuple[ClusterFeatures, tuple[BrokerStatus, ...]]:
    async with connect(bootstrap_servers) as client:
        status = await client.admin.cluster.status()
        return await client.admin.cluster.features(), status.brokers


async def _raise_level(bootstrap_servers: str, level: int, *, dry_run: bool) -> None:
    """Raise the level, and wait for some seconds until each broker knows it: before, a broker refuses what needs it."""
    import asyncio

    async with connect(bootstrap_servers) as client:
        cluster = client.admin.cluster
        await cluster.raise_feature_level(level, dry_run=dry_run)
        for _ in range(0 if dry_run else LOOKS_MAX):
            brokers = (await cluster.features()).brokers
            if all(one.level >= level for one in brokers if one.error is None):
                return
            await asyncio.sleep(POLL_S)


def _rows(features: ClusterFeatures, brokers: tuple[BrokerStatus, ...]) -> list[dict[str, Any]]:
    from mansio.metadata.feature_level import RELEASES

    found = {one.node_id: one for one in features.brokers}
    rows = []
    for broker in brokers:
        known = found.get(broker.node_id)
        highest = None if known is None or known.error is not None else known.highest
        rows.append(
            {
                "broker": broker.node_id,
                "address": None if broker.is_fenced else f"{broker.host}:{broker.port}",
                "state": "fenced" if broker.is_fenced else "active",
                "version": None
                if highest is None
                else RELEASES.get(highest, f"after {max(RELEASES.values())}"),
                "levels": None if known is None or highest is None else [known.lowest, highest],
            }
        )
    return rows


def _show(features: ClusterFeatures, brokers: tuple[BrokerStatus, ...], *, is_due: bool) -> None:
    from mansio.metadata.feature_level import CURRENT_LEVEL, RELEASES

    print(f"feature level {features.level} ({RELEASES.get(features.level, 'of a later version')})")
    rows = [{**row, "levels": "-".join(map(str, row["levels"] or ()))} for row in _rows(features, brokers)]
    show_rows(Output.TABLE, rows, COLUMNS, empty="no brokers")
    if is_due:
        print(f"possible with level {CURRENT_LEVEL} ({RELEASES[CURRENT_LEVEL]}):")
        for line in POSSIBLE:
            print(f"  {line}")
