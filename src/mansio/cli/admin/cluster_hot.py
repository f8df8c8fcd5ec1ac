"""`mansio cluster hot`: hot partitions of a cluster, their most frequent keys, and what helps.

Invariants:
* Without --apply nothing is changed. What would change is shown first, with the gain, and needs a confirmation (`--yes`
  or a prompt).
* A topic grows only with --accept-new-key-order, and a compacted one not at all.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    YesOption,
    confirm,
    connect,
    parse_duration_s,
    print_error,
    run,
    usage_error,
)
from mansio.cli.support.formatting import (
    Output,
    OutputOption,
    count_text,
    format_cell,
    show_json,
    show_table,
    text_or_base64,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.cli.admin.cluster_moves import Outcome
    from mansio.client import Client
    from mansio.client.admin.hot_partitions import HotKey, HotPartition, HotPartitions
    from mansio.metadata.move_planner import Move
    from mansio.state.hot_partitions.remedies import Remedy

COLUMNS: Final = ("topic", "partition", "leader", "rate", "factor", "most_frequent_key", "remedy")
KEY_CHARACTERS: Final = 24


def hot(
    keys: Annotated[
        int, typer.Option("--keys", min=0, max=20, metavar="N", help="Number of keys of each partition.")
    ] = 5,
    apply: Annotated[
        bool, typer.Option("--apply", help="Move leaders away from full brokers, where this helps.")
    ] = False,
    accept_new_key_order: Annotated[
        bool,
        typer.Option(
            "--accept-new-key-order",
            help="With --apply: also grow topics that are not compacted. Keys get other partitions.",
        ),
    ] = False,
    full_at: Annotated[
        int,
        typer.Option(
            "--full-at", min=1, max=1000, metavar="PERCENT", help="Use of a core from which a broker is full."
        ),
    ] = 70,
    cool_down: Annotated[
        str,
        typer.Option(
            "--cool-down",
            metavar="DURATION",
            help="Time after a change of its leader in which a partition is not moved.",
        ),
    ] = "10m",
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """List hot partitions, their most frequent keys, and what helps.

    A partition is hot while it takes in at least three times the median of its topic's partitions (of a topic with two
    or three: 80 % of it), in three of the last five windows of 10 s. FACTOR: of the median. Keys are shown to users
    that may read the topic. The exit code is 1 if a broker does not answer or a change failed.
    """
    if accept_new_key_order and not apply:
        usage_error("only with --apply", "--accept-new-key-order")
    cool_down_s = parse_duration_s(cool_down, "--cool-down", examples="0s, 10m, 1h")

    async def read() -> HotPartitions:
        async with connect(bootstrap_servers) as client:
            return await client.admin.cluster.hot_partitions(
                keys_max=keys, full_share=full_at / 100, cool_down_s=cool_down_s
            )

    found = run(read())
    if output is Output.TABLE:
        _show(found)
    executed: list[dict[str, Any]] = []
    if apply:
        executed = _apply(found, bootstrap_servers, grows=accept_new_key_order, is_sure=yes)
    if output is Output.JSON:
        show_json(_as_json(found, executed))
    for node_id, error in sorted(found.errors.items()):
        print_error(f"broker {node_id} does not answer: {error.message}")
    for node_id in found.disabled:
        print_error(f"broker {node_id} does not look for hot partitions: its hot_partition_window_ms is 0")
    failed = sum(each["error"] is not None for each in executed)
    if failed:
        print_error(f"{failed} of {count_text(len(executed), 'change')} failed")
    if failed or found.errors:
        raise typer.Exit(1)


def _show(found: HotPartitions) -> None:
    if not found.partitions:
        print("no partition is hot", file=sys.stderr)
        return
    rows = [_row(each) for each in found.partitions]
    show_table(COLUMNS, [[format_cell(row[name]) for name in COLUMNS] for row in rows])
    for each in found.partitions:
        print()
        print(f"{each.topic}-{each.partition}")
        if each.key_access == "not authorized":
            print("  keys: you may not read the topic")
        elif each.key_access == "not sampled":
            print("  keys: not sampled")
        for key in each.keys:
            print(f"  key {_key_text(key)}: {_share_text(key)} of {each.sampled_records:,} sampled records")
        for remedy in each.remedies:
            print(f"  {remedy.kind}: {remedy.reason}")
            if (command := _command_of(each, remedy)) is not None:
                print(f"    {command}")
        if not each.remedies:
            print("  nothing to do: broker and groups keep up")


def _row(one: HotPartition) -> dict[str, Any]:
    factor = one.factor
    return {
        "topic": one.topic,
        "partition": one.partition,
        "leader": one.leader,
        "rate": f"{one.rate:,.0f}/s",
        "factor": "others idle" if factor is None else f"{factor:.1f}",
        "most_frequent_key": f"{_key_text(one.keys[0])} {_share_text(one.keys[0])}" if one.keys else None,
        "remedy": one.remedies[0].kind if one.remedies else "none",
    }


def _key_text(key: HotKey) -> str:
    text, _ = text_or_base64(key.key)
    shown = repr(text)[1:-1]
    return shown if len(shown) <= KEY_CHARACTERS else f"{shown[: KEY_CHARACTERS - 1]}…"


def _share_text(key: HotKey) -> str:
    low, high = f"{key.share_min:.0%}", f"{key.share_max:.0%}"
    return low if low == high else f"{low[:-1]}-{high}"


def _command_of(one: HotPartition, remedy: Remedy) -> str | None:
    if remedy.move is not None:
        return "mansio cluster hot --apply"
    if remedy.partitions is not None:
        return f"mansio topic alter {one.topic} --partitions {remedy.partitions}"
    return None


def _as_json(found: HotPartitions, executed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "partitions": [partition_json(each) for each in found.partitions],
        "brokers": [each._asdict() for each in found.brokers],
        "errors": {str(node_id): error.message for node_id, error in sorted(found.errors.items())},
        "disabled": list(found.disabled),
        "executed": list(executed),
    }


def partition_json(one: HotPartition) -> dict[str, Any]:
    """Return a hot partition as the JSON output has it."""
    keys = []
    for each in one.keys:
        text, encoding = text_or_base64(each.key)
        keys.append(
            {"key": text, "key_encoding": encoding, "share_min": each.share_min, "share_max": each.share_max}
        )
    remedies = []
    for remedy in one.remedies:
        move = None if remedy.move is None else {**remedy.move._asdict(), "gain": remedy.move.gain}
        shown = {name: value for name, value in remedy._asdict().items() if name != "key"}
        remedies.append({**shown, "move": move, "command": _command_of(one, remedy)})
    return {
        "topic": one.topic,
        "partition": one.partition,
        "leader": one.leader,
        "rate": one.rate,
        "median_rate": one.median_rate,
        "topic_rate": one.topic_rate,
        "factor": one.factor,
        "partition_count": one.partition_count,
        "led_s": one.led_s,
        "replicas": list(one.replicas),
        "in_sync_replicas": list(one.in_sync_replicas),
        "compacted": one.is_compacted,
        "key_access": one.key_access,
        "sampled_records": one.sampled_records,
        "keys": keys,
        "remedies": remedies,
    }


def _apply(
    found: HotPartitions, bootstrap_servers: str, *, grows: bool, is_sure: bool
) -> list[dict[str, Any]]:
    """Show the gain of each change, ask, and execute them; return a row for each."""
    moves = [
        (each, remedy) for each in found.partitions for remedy in each.remedies if remedy.move is not None
    ]
    growths = {
        each.topic: remedy.partitions
        for each in found.partitions
        for remedy in each.remedies
        if remedy.partitions is not None and grows
    }
    if not moves and not growths:
        print("mansio: there is nothing to apply", file=sys.stderr, flush=True)
        return []
    for one, remedy in moves:
        move = remedy.move
        assert move is not None
        print(
            f"mansio: {one.topic}-{one.partition}: leader {move.source} -> {move.target}; highest load of the two"
            f" {move.busy_before:.0%} -> {move.busy_after:.0%} of a core",
            file=sys.stderr,
            flush=True,
        )
    effects = []
    if moves:
        effects.append(f"move {count_text(len(moves), 'leader')}")
    effects += [
        f"grow {topic} to {count} partitions: keys get other partitions, and their order across the change is lost"
        for topic, count in sorted(growths.items())
    ]
    confirm("; ".join(effects), is_sure=is_sure)
    return run(_execute(bootstrap_servers, moves, growths))


async def _execute(
    bootstrap_servers: str,
    moves: Sequence[tuple[HotPartition, Remedy]],
    growths: Mapping[str, int],
) -> list[dict[str, Any]]:
    from mansio.errors import MansioError

    rows = []
    async with connect(bootstrap_servers) as client:
        if moves:
            rows += await _move_leaders(client, moves)
        for topic, count in sorted(growths.items()):
            error = None
            try:
                await client.admin.create_partitions(topic, count)
            except MansioError as failure:
                error = failure.message
            rows.append({"change": "grow-topic", "topic": topic, "partitions": count, "error": error})
    return rows


async def _move_leaders(client: Client, moves: Sequence[tuple[HotPartition, Remedy]]) -> list[dict[str, Any]]:
    """Make each target the first replica, and elect it. Nothing is copied. A partition that is being reassigned is left
    alone."""
    from mansio.cli.admin.cluster_moves import MoveRunner, elect_preferred_leaders
    from mansio.metadata.move_planner import Move

    cluster = client.admin.cluster
    moving = {(one.topic, one.partition) for one in await cluster.list_reassignments()}
    planned: list[Move] = []
    rows = []
    for one, remedy in moves:
        assert remedy.move is not None
        target = remedy.move.target
        if (one.topic, one.partition) in moving:
            rows.append(_moved_row(one.topic, one.partition, target, "its replicas are being moved"))
            continue
        after = (target, *(node_id for node_id in one.replicas if node_id != target))
        planned.append(Move(one.topic, one.partition, one.replicas, after, one.leader, 0))
    runner = MoveRunner(cluster, planned, on_progress=lambda _: None, on_stall=lambda _: None)
    outcomes: list[Outcome] = await runner.run()
    reordered = [each.move for each in outcomes if each.error is None]
    await elect_preferred_leaders(cluster, reordered)
    for each in outcomes:
        move = each.move
        error = None if each.error is None else each.error.message
        if error is None:
            error = await _leader_error(client, move)
        rows.append(_moved_row(move.topic, move.partition, move.after[0], error))
    return rows


async def _leader_error(client: Client, move: Move) -> str | None:
    """Return why a partition does not have its new leader; None if it has."""
    for one in await client.admin.cluster.partitions([move.topic]):
        if one.partition == move.partition and one.leader != move.after[0]:
            return f"broker {one.leader} leads it; later: mansio cluster elect --topic {move.topic}"
    return None


def _moved_row(topic: str, partition: int, target: int, error: str | None) -> dict[str, Any]:
    return {
        "change": "move-leader",
        "topic": topic,
        "partition": partition,
        "target": target,
        "error": error,
    }
