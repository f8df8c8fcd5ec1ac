"""`mansio cluster`: status, brokers and partitions of a cluster, settings of running brokers, leader elections,
moves of partitions, hot partitions (`cluster_hot`), and the end of an upgrade (`cluster_upgrade`).

Invariants:
* All output comes from the brokers over the Kafka protocol at the time of the command.
* An unclean election and moves require confirmation (`--yes` or a prompt).
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mansio.cli.admin.cluster_hot import hot
from mansio.cli.admin.cluster_upgrade import finalize
from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    DryRunOption,
    PartitionsOption,
    YesOption,
    confirm,
    connect,
    parse_duration_s,
    parse_name_values,
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
    show_rows,
    show_table,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.cli.admin.cluster_moves import ClusterLoad, Outcome
    from mansio.cli.admin.rolling_restart import RestartCommand
    from mansio.client.admin.cluster import BrokerHealth, BrokerStatus, ClusterStatus, PartitionStatus
    from mansio.client.types import TopicPartition
    from mansio.metadata.move_planner import Goal, Move

app = typer.Typer(
    no_args_is_help=True,
    help="Status, brokers, partition leaders and under-replicated partitions; moves of partitions.",
)

app.command()(finalize)
app.command()(hot)

UNCLEAN_WARNING = (
    "a replica that is not in sync becomes the leader: every record it does not have is lost permanently, including "
    "acknowledged ones, and consumers that have read them continue at offsets that may have other records"
)
BROKER_COLUMNS = ("broker", "address", "rack", "controller", "state", "leads", "replicas", "not_in_sync")
PARTITION_COLUMNS = (
    "topic",
    "partition",
    "leader",
    "leader_epoch",
    "replicas",
    "in_sync",
    "offline_replicas",
    "min_in_sync",
    "state",
)
SETTING_COLUMNS = ("name", "value", "source", "changeable")
ELECTION_COLUMNS = ("topic", "partition", "outcome", "error")
BALANCE_COLUMNS = ("broker", "replicas", "replicas_after", "bytes", "bytes_after", "leads", "leads_after")
MOVE_COLUMNS = ("topic", "partition", "before", "after", "copied_bytes")
RUNNING_COLUMNS = (
    "topic",
    "partition",
    "replicas",
    "adding",
    "removing",
    "copied_bytes",
    "total_bytes",
    "throttle",
)
RESTART_COLUMNS = ("broker", "host", "controller", "leads", "replicas", "below_min_isr")
CANCEL_COLUMNS = ("topic", "partition", "outcome", "error")
ROUNDS_MAX = 10
"""How often `drain` and `replace` plan again for replicas that the broker got meanwhile."""


class PartitionFilter(StrEnum):
    """Problem by which `mansio cluster partitions` selects partitions; `troubled` is any of the others."""

    ANY_PROBLEM = "troubled"
    OFFLINE = "offline"
    UNDER_REPLICATED = "under-replicated"
    UNDER_MIN_IN_SYNC = "under-min-in-sync"


TopicsOption = Annotated[
    list[str] | None,
    typer.Option("--topic", "-t", metavar="TOPIC", help="Only this topic; repeatable."),
]
ThrottleOption = Annotated[
    int | None,
    typer.Option(
        "--throttle",
        min=1,
        metavar="BYTES",
        help="Bytes per second that each broker copies at most, of all its replicas that are not in sync.",
    ),
]


@app.callback()
def command_group() -> None:
    """Status, brokers, partition leaders and under-replicated partitions; moves of partitions."""


@app.command()
def status(
    output: OutputOption = Output.TABLE, bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS
) -> None:
    """Show a summary of the cluster: brokers, partitions, and the number of partitions with a problem.

    FENCED: declared dead. NO SESSION: its session is not held, so that it acknowledges nothing with acks=all. OFFLINE:
    without a leader. UNDER MIN ISR: acks=all is rejected. UNDER REPLICATED: a replica is not in sync.

    The exit code is 1 if a broker's session is not held or a broker does not answer, after a line for each that says
    since when and why.
    """
    cluster, partitions, health = run(_describe_cluster(bootstrap_servers))
    found = status_row(cluster, partitions, health)
    faults = [line for one in health if (line := session_fault(one))]
    if output is Output.JSON:
        show_json({**found, "faults": faults})
    else:
        _show_summary(found)
    for line in faults:
        print_error(line)
    if faults:
        raise typer.Exit(1)


def _show_summary(found: Mapping[str, Any]) -> None:
    controller = found["controller"] if found["controller"] is not None else "none now"
    print(f"cluster  {found['cluster_id']}  controller {controller}")
    counted = (
        "brokers",
        "fenced",
        "no_session",
        "topics",
        "partitions",
        "offline",
        "under_min_isr",
        "under_replicated",
    )
    show_table(counted, [[format_cell(found[name]) for name in counted]])


@app.command()
def brokers(
    output: OutputOption = Output.TABLE, bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS
) -> None:
    """List the brokers: address, leaderships, replicas, and replicas that are not in sync.

    STATE gone: the broker is not registered, although replicas are placed on it. STATE no session: its session is not
    held. STATE no answer: it is registered and does not answer.
    """
    cluster, partitions, health = run(_describe_cluster(bootstrap_servers))
    healthy = {one.node_id: one for one in health}
    known = {one.node_id: one for one in cluster.brokers}
    replica_brokers = {node_id for one in partitions for node_id in one.replicas}
    rows = [
        _broker_row(node_id, known.get(node_id), healthy.get(node_id), partitions)
        for node_id in sorted({*known, *replica_brokers})
    ]
    show_rows(output, rows, BROKER_COLUMNS, empty="no brokers")


@app.command()
def partitions(
    topic: TopicsOption = None,
    only: Annotated[
        PartitionFilter | None,
        typer.Option("--only", help="Only partitions with this problem; troubled: with any."),
    ] = None,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """List partitions, including internal topics: leader, replicas and in-sync replicas.

    STATE is the most severe of: offline (no leader), under-min-in-sync (acks=all is rejected), under-replicated (a
    replica is not in sync), ok.
    """

    async def work() -> list[PartitionStatus]:
        async with connect(bootstrap_servers) as client:
            return await client.admin.cluster.partitions(topic)

    rows = [_partition_row(one) for one in run(work()) if _matches_filter(one, only)]
    show_rows(
        output,
        rows,
        PARTITION_COLUMNS,
        empty="no partition is in that state" if only or topic else "no partitions",
    )


@app.command()
def settings(
    broker: Annotated[
        int | None,
        typer.Option(
            "--broker", metavar="N", help="Node id of a broker. [default: the defaults of all brokers]"
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            "-c",
            metavar="NAME=VALUE",
            help="A setting to change, by Kafka's name (log.retention.ms=3600000); repeatable.",
        ),
    ] = None,
    unset: Annotated[
        list[str] | None,
        typer.Option("--unset", "-u", metavar="NAME", help="Remove a changed setting; repeatable."),
    ] = None,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Change settings of running brokers, or show them.

    With --broker of one broker, else the defaults of all brokers. A broker's own value precedes the default, and both
    precede its file and environment. Settings that are read at the start are refused.
    """
    changes: dict[str, str | None] = dict(parse_name_values(config or (), "--config"))
    changes.update(dict.fromkeys(unset or (), None))

    async def work() -> list[dict[str, Any]]:
        async with connect(bootstrap_servers) as client:
            if changes:
                await client.admin.alter_broker_config(broker, changes)
                return []
            found = await client.admin.describe_config("" if broker is None else broker, kind="broker")
        return [
            {
                "name": name,
                "value": entry.value,
                "source": entry.source,
                "changeable": not entry.is_read_only,
            }
            for name, entry in sorted(found.items())
        ]

    rows = run(work())
    if not changes:
        show_rows(output, rows, SETTING_COLUMNS, empty="no defaults of all brokers are set")


@app.command()
def elect(
    topic: TopicsOption = None,
    partition: PartitionsOption = None,
    unclean: Annotated[
        bool,
        typer.Option(
            "--unclean",
            help="Allow replicas that are not in sync to lead partitions without a leader. Loses records; requires "
            "--topic.",
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask for confirmation of an unclean election.")
    ] = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Elect the preferred leader of partitions: the first of their replicas. No records are lost.

    Without --topic for all partitions that are not led by their preferred leader. With --unclean a partition without a
    leader gets one that is not in sync: the records it lacks are lost permanently. The exit code is 1 if an election
    failed.
    """
    if partition and len(topic or ()) != 1:
        usage_error("requires exactly one --topic", "--partition")
    if unclean:
        _confirm_unclean_election(topic or (), is_sure=yes)

    async def work() -> list[dict[str, Any]]:
        async with connect(bootstrap_servers) as client:
            wanted = None
            if topic:
                wanted = _select_partitions(await client.admin.cluster.partitions(topic), partition or ())
            results = await client.admin.cluster.elect_leaders("unclean" if unclean else "preferred", wanted)
        return [
            {
                "topic": one.topic,
                "partition": one.partition,
                "outcome": one.outcome,
                "error": None if one.error is None else one.error.message,
            }
            for one in results
        ]

    rows = run(work())
    show_rows(output, rows, ELECTION_COLUMNS, empty="no election was needed")
    failed = sum(row["outcome"] == "failed" for row in rows)
    if failed:
        raise typer.Exit(print_error(f"{failed} of {len(rows)} elections failed: see ERROR"))


@app.command()
def rebalance(
    throttle: ThrottleOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Move partitions so that all brokers have even numbers of replicas, bytes and leaders, new brokers included.

    The plan is shown first. Replicas stay on different racks where there are enough; brokers of one rack share what the
    rack has. Records remain readable and writable. If the command is interrupted, moves that have begun go on; run it
    again to continue. The exit code is 1 if a move failed.
    """
    from mansio.metadata.move_planner import Rebalance

    options = _MoveOptions(throttle, dry_run, yes, output, bootstrap_servers)
    _carry_out("rebalance", Rebalance(), options)


@app.command()
def drain(
    broker: Annotated[int, typer.Argument(metavar="BROKER", help="Node id of the broker.")],
    throttle: ThrottleOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Move all replicas of a broker to others, so that it can be stopped for good.

    See rebalance. Refused if fewer brokers remain than a partition has replicas. The broker may be down, as long as its
    partitions have leaders. The exit code is 1 if replicas remain on the broker.
    """
    from mansio.metadata.move_planner import Drain

    options = _MoveOptions(throttle, dry_run, yes, output, bootstrap_servers)
    _carry_out(f"drain broker {broker}", Drain(broker), options, leaving=broker)


@app.command()
def replace(
    old: Annotated[int, typer.Argument(metavar="OLD", help="Node id of the broker that leaves.")],
    new: Annotated[int, typer.Argument(metavar="NEW", help="Node id of the broker that takes its place.")],
    throttle: ThrottleOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Move all replicas of broker OLD to broker NEW, at the same positions in the lists of replicas.

    See drain. NEW should be in the rack of OLD: a move that puts more replicas of a partition into one rack is refused.
    A partition that has a replica on NEW already gets another broker.
    """
    from mansio.metadata.move_planner import Replace

    options = _MoveOptions(throttle, dry_run, yes, output, bootstrap_servers)
    _carry_out(f"replace broker {old} by {new}", Replace(old, new), options, leaving=old)


@app.command()
def remove(
    broker: Annotated[int, typer.Argument(metavar="BROKER", help="Node id of the broker.")],
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Have the cluster forget a broker that was drained and stopped.

    Refused while the broker runs or has replicas. It can join again: start it. A broker that is not registered is
    forgotten already: the exit code is 0.
    """

    async def work() -> bool:
        from mansio.errors import BrokerIdNotRegistered

        async with connect(bootstrap_servers) as client:
            try:
                await client.admin.cluster.unregister(broker)
            except BrokerIdNotRegistered:
                return False
        return True

    is_removed = run(work())
    message = f"broker {broker} was removed" if is_removed else f"broker {broker} is not registered"
    print(f"mansio: {message}", file=sys.stderr, flush=True)


@app.command("rolling-restart")
def rolling_restart(
    command: Annotated[
        str | None,
        typer.Option(
            "--command",
            metavar="COMMAND",
            help="Restarts one broker: {broker} is its node id, {host} its address. Not run by a shell."
            " [default: the command names the broker, and waits until you have restarted it]",
        ),
    ] = None,
    brokers: Annotated[
        str | None,
        typer.Option(
            "--brokers", metavar="N,N", help="Only these brokers, in this order. [default: all that are up]"
        ),
    ] = None,
    timeout: Annotated[
        str,
        typer.Option("--timeout", metavar="TIME", help="Bound of each wait, as 30s, 10m or 1h."),
    ] = "10m",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Restart the brokers one at a time, the one of the controller last.

    A broker is restarted when all replicas of the others are in sync. The next one follows when it is back with a new
    session, its replicas are in sync, and it leads what it is the preferred leader of. A broker that stops on SIGTERM
    transfers its leaderships itself. BELOW MIN ISR: partitions with too few replicas, for which acks=all is rejected
    meanwhile. At the first failure the command ends, and prints how to continue.
    """
    from mansio.cli.admin.rolling_restart import RestartCommand

    try:
        restart = None if command is None else RestartCommand.parse(command)
    except ValueError as error:
        usage_error(str(error), "--command")
    timeout_s = parse_duration_s(timeout, "--timeout", examples="30s, 10m, 1h")
    chosen, rows = run(_plan_restarts(bootstrap_servers, _parse_node_ids(brokers)))
    show_rows(output, rows, RESTART_COLUMNS, empty="no brokers")
    if dry_run:
        return
    below = sum(row["below_min_isr"] for row in rows)
    effect = f"restart {count_text(len(chosen), 'broker')}, one at a time"
    if below:
        effect += f"; acks=all is rejected for {count_text(below, 'partition')} meanwhile, because of too few replicas"
    confirm(effect, is_sure=yes)
    run(_restart_brokers(bootstrap_servers, chosen, restart, timeout_s))


def _parse_node_ids(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts) or len(set(parts)) < len(parts):
        usage_error(f"{text!r} is no list of different node ids, as 1,2,3", "--brokers")
    return [int(part) for part in parts]


async def _plan_restarts(
    bootstrap_servers: str, node_ids: Sequence[int] | None
) -> tuple[list[BrokerStatus], list[dict[str, Any]]]:
    """Return the brokers to restart, in order, and a row about each. Without `node_ids` those that are up."""
    from mansio.cli.admin.rolling_restart import below_min_in_sync, restart_order
    from mansio.errors import InvalidRequest

    async with connect(bootstrap_servers) as client:
        found = await client.admin.cluster.status()
        partitions = await client.admin.cluster.partitions()
    known = {one.node_id: one for one in found.brokers}
    if len(known) < 2:
        raise InvalidRequest("a rolling restart needs several brokers; restart the only one by hand")
    for node_id in node_ids or ():
        if node_id not in known:
            raise InvalidRequest(f"there is no broker {node_id}")
    chosen = [one for one in found.brokers if not one.is_fenced]
    if node_ids is not None:
        chosen = [known[node_id] for node_id in node_ids]
    else:
        for one in found.brokers:
            if one.is_fenced:
                print_error(f"broker {one.node_id} is down, and is not restarted")
    ordered = restart_order(chosen, found.controller_id)
    rows = [
        {
            "broker": one.node_id,
            "host": one.host or None,
            "controller": one.is_controller,
            "leads": sum(each.leader == one.node_id for each in partitions),
            "replicas": sum(one.node_id in each.replicas for each in partitions),
            "below_min_isr": below_min_in_sync(partitions, one.node_id),
        }
        for one in ordered
    ]
    return ordered, rows


async def _restart_brokers(
    bootstrap_servers: str,
    brokers: Sequence[BrokerStatus],
    command: RestartCommand | None,
    timeout_s: float,
) -> None:
    from mansio.cli.admin.rolling_restart import RollingRestart
    from mansio.errors import MansioError

    def report(text: str) -> None:
        print(f"mansio: {text}", file=sys.stderr, flush=True)

    async def restart(node_id: int, host: str) -> None:
        if command is None:
            report(f"broker {node_id}{f' on {host}' if host else ''}: restart it now")
        else:
            report(f"broker {node_id}: restarting")
            await command.run(node_id, host)

    async with connect(bootstrap_servers) as client:
        work = RollingRestart(
            client.admin.cluster, brokers, restart=restart, report=report, timeout_s=timeout_s
        )
        try:
            await work.run()
        except BaseException as error:
            if isinstance(error, MansioError):
                print_error(error.message)
            done = ", ".join(map(str, work.done)) or "none"
            left = ",".join(map(str, work.left))
            if work.stopped is not None:
                report(f"broker {work.stopped} may be stopped: start it by hand if it is")
            report(f"restarted brokers: {done}; to continue, run the command again with --brokers {left}")
            if isinstance(error, MansioError):
                raise typer.Exit(1) from None
            raise


@app.command()
def moves(
    output: OutputOption = Output.TABLE, bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS
) -> None:
    """List the moves of partitions that are running, and how much of them is copied.

    THROTTLE: bytes per second that a broker copies at most. The throttle of a command that was interrupted is removed
    if no moves are running any more.
    """

    async def work() -> list[dict[str, Any]]:
        from mansio.cli.admin.cluster_moves import (
            copied_bytes,
            read_load,
            read_throttles,
            remove_unused_throttles,
        )

        async with connect(bootstrap_servers) as client:
            cluster = client.admin.cluster
            await remove_unused_throttles(client.admin)
            throttles = await read_throttles(client.admin)
            load, dirs = await read_load(cluster), await cluster.log_dirs()
            total = {(move.topic, move.partition): move.copied_bytes for move in load.running}
            return [
                {
                    "topic": one.topic,
                    "partition": one.partition,
                    "replicas": list(one.target),
                    "adding": list(one.adding),
                    "removing": list(one.removing),
                    "copied_bytes": copied_bytes(one, dirs),
                    "total_bytes": total.get((one.topic, one.partition)),
                    "throttle": min(
                        (throttles[node_id] for node_id in one.adding if node_id in throttles), default=None
                    ),
                }
                for one in await cluster.list_reassignments()
            ]

    show_rows(output, run(work()), RUNNING_COLUMNS, empty="no moves are running")


@app.command("cancel-moves")
def cancel_moves(
    topic: TopicsOption = None,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """End the moves that are running: their partitions return to the replicas that they had before.

    No records are lost. If no move is left, the throttle is removed. The exit code is 1 if a move could not be ended.
    """

    async def read() -> list[tuple[str, int]]:
        async with connect(bootstrap_servers) as client:
            found = await client.admin.cluster.list_reassignments()
        return [(one.topic, one.partition) for one in found if not topic or one.topic in topic]

    async def cancel(wanted: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
        from mansio.cli.admin.cluster_moves import remove_unused_throttles
        from mansio.errors import NoReassignmentInProgress

        async with connect(bootstrap_servers) as client:
            results = await client.admin.cluster.alter_reassignments(dict.fromkeys(wanted))
            await remove_unused_throttles(client.admin)
        return [
            {
                "topic": one.topic,
                "partition": one.partition,
                "outcome": "cancelled"
                if one.error is None
                else "ended before"
                if isinstance(one.error, NoReassignmentInProgress)
                else "failed",
                "error": None if one.error is None else one.error.message,
            }
            for one in results
        ]

    wanted = run(read())
    if wanted:
        confirm(
            f"cancel {count_text(len(wanted), 'move')}: what was copied for {'it' if len(wanted) == 1 else 'them'} is"
            " deleted",
            is_sure=yes,
        )
    rows = run(cancel(wanted)) if wanted else []
    show_rows(output, rows, CANCEL_COLUMNS, empty="no moves are running")
    failed = sum(row["outcome"] == "failed" for row in rows)
    if failed:
        raise typer.Exit(
            print_error(f"{failed} of {count_text(len(rows), 'move')} could not be ended: see ERROR")
        )


class _MoveOptions(NamedTuple):
    """Options of the commands that move partitions."""

    throttle: int | None
    dry_run: bool
    is_sure: bool
    output: Output
    bootstrap_servers: str


def _carry_out(title: str, goal: Goal, options: _MoveOptions, *, leaving: int | None = None) -> None:
    """Plan moves, show them and execute them. `leaving`: the broker that is to have no replicas; the replicas that it
    gets meanwhile are moved, too."""
    from mansio.metadata.move_planner import plan_moves

    planned: list[Move] = []
    outcomes: list[Outcome] = []
    for number in range(ROUNDS_MAX):
        load = run(_read_load(options.bootstrap_servers))
        if number and leaving is not None and not load.running and not _has_replicas(load, leaving):
            break  # the broker need not be registered any more
        moves = plan_moves(load.brokers, load.partitions, goal)
        if number == 0:
            planned = moves
            _show_plan(load, moves, options)
        is_finished = not moves and not load.running
        is_single = leaving is None and number > 0
        has_failed = any(one.has_failed for one in outcomes)
        if options.dry_run or is_finished or is_single or has_failed:
            if not number and not options.dry_run:
                run(_remove_unused_throttles(options.bootstrap_servers))
            break
        if number == 0 and moves:
            _check_space(load, moves)
            confirm(_summary_of(title, moves, options.throttle), is_sure=options.is_sure)
        outcomes += run(_execute(load, moves, options))
    _show_outcomes(planned, outcomes, options)
    failed = sum(one.has_failed for one in outcomes)
    if failed:
        raise typer.Exit(
            print_error(f"{failed} of {count_text(len(outcomes), 'move')} failed; run the command again")
        )
    if leaving is not None and not options.dry_run:
        _check_left(load, leaving)
        print(
            f"mansio: broker {leaving} has no replicas: stop it, then mansio cluster remove {leaving}",
            file=sys.stderr,
            flush=True,
        )


def _has_replicas(load: ClusterLoad, node_id: int) -> bool:
    return any(node_id in one.replicas for one in load.partitions)


async def _remove_unused_throttles(bootstrap_servers: str) -> None:
    from mansio.cli.admin.cluster_moves import remove_unused_throttles

    async with connect(bootstrap_servers) as client:
        await remove_unused_throttles(client.admin)


async def _read_load(bootstrap_servers: str) -> ClusterLoad:
    from mansio.cli.admin.cluster_moves import read_load

    async with connect(bootstrap_servers) as client:
        return await read_load(client.admin.cluster)


async def _execute(load: ClusterLoad, moves: Sequence[Move], options: _MoveOptions) -> list[Outcome]:
    """Execute a plan, and wait for the moves that were running before it."""
    import asyncio

    from mansio.cli.admin.cluster_moves import (
        MoveRunner,
        ProgressLines,
        elect_preferred_leaders,
        throttled,
    )

    lines = ProgressLines(clock=asyncio.get_running_loop().time)
    async with connect(options.bootstrap_servers) as client:
        runner = MoveRunner(
            client.admin.cluster, moves, running=load.running, on_progress=lines.show, on_stall=_report_stall
        )
        targets = sorted({node_id for move in (*moves, *load.running) for node_id in move.added})
        try:
            async with throttled(client.admin, targets, options.throttle, running=lambda: runner.running):
                outcomes = await runner.run()
        except BaseException as error:
            lines.end()
            is_interrupted = isinstance(error, asyncio.CancelledError)
            _report_interruption(runner.running, options.throttle, is_interrupted=is_interrupted)
            raise
        moved = [outcome.move for outcome in outcomes if outcome.error is None]
        if failed := await elect_preferred_leaders(client.admin.cluster, moved):
            print_error(
                f"{count_text(failed, 'partition')} could not get the preferred leader now; later: mansio cluster elect"
            )
    return outcomes


def _report_interruption(running: int, throttle: int | None, *, is_interrupted: bool) -> None:
    """Say what goes on without the command, and which commands continue or end it."""
    from mansio.cli.admin.cluster_moves import bytes_text

    reason = "interrupted" if is_interrupted else "the command failed"
    if running:
        rate = "" if throttle is None else f" at the throttle of {bytes_text(throttle)}/s"
        text = f"{count_text(running, 'move')} that began go on{rate}. Run the command again to continue, or end them"
        text += " with mansio cluster cancel-moves"
        if throttle is not None:
            text += "; both remove the throttle, as mansio cluster moves does after the last move"
    else:
        text = "no moves are running. Run the command again to continue"
    print(f"mansio: {reason}; {text}", file=sys.stderr, flush=True)


def _report_stall(running: int) -> None:
    print_error(
        f"no move has ended for 5 minutes, {count_text(running, 'move')} run: mansio cluster moves shows how much is"
        " copied; a higher --throttle may be necessary"
    )


def _check_space(load: ClusterLoad, moves: Sequence[Move]) -> None:
    """End the command if a broker has less free space than it would get."""
    from mansio.cli.admin.cluster_moves import bytes_text
    from mansio.metadata.move_planner import incoming_bytes

    for node_id, size_bytes in sorted(incoming_bytes(moves).items()):
        free_bytes = load.free_bytes.get(node_id)
        if free_bytes is not None and free_bytes < size_bytes:
            message = (
                f"broker {node_id} has {bytes_text(free_bytes)} free, and would get {bytes_text(size_bytes)}"
            )
            raise typer.Exit(print_error(f"{message}: nothing was changed"))


def _summary_of(title: str, moves: Sequence[Move], throttle: int | None) -> str:
    from mansio.cli.admin.cluster_moves import bytes_text, duration_text
    from mansio.metadata.move_planner import copy_seconds

    text = f"{title}: {count_text(len(moves), 'move')}, {bytes_text(sum(move.copied_bytes for move in moves))} to copy"
    if reordered := sum(not move.added for move in moves):
        text += f"; {reordered:,} of them change the preferred leader only"
    if throttle is not None:
        text += f"; at {bytes_text(throttle)}/s about {duration_text(copy_seconds(moves, throttle))}"
    return text


def _show_plan(load: ClusterLoad, moves: Sequence[Move], options: _MoveOptions) -> None:
    from mansio.cli.admin.cluster_moves import broker_rows

    if load.running:
        print(
            f"mansio: {count_text(len(load.running), 'move')} of an earlier command are running",
            file=sys.stderr,
            flush=True,
        )
    if without_leader := sum(one.leader < 0 for one in load.partitions):
        print_error(
            f"{count_text(without_leader, 'partition')} without a leader cannot be moved: mansio cluster partitions"
            " --only offline"
        )
    if options.output is Output.JSON:
        return
    if not moves:
        print("nothing to move", file=sys.stderr)
        return
    rows = broker_rows(load, moves)
    show_table(BALANCE_COLUMNS, [[format_cell(row[name]) for name in BALANCE_COLUMNS] for row in rows])
    if options.dry_run:
        print()
        rows = [_move_row(move) for move in moves]
        show_table(MOVE_COLUMNS, [[format_cell(row[name]) for name in MOVE_COLUMNS] for row in rows])
        print(f"mansio: {_summary_of('plan', moves, options.throttle)}", file=sys.stderr, flush=True)


def _move_row(move: Move) -> dict[str, Any]:
    return {
        "topic": move.topic,
        "partition": move.partition,
        "before": list(move.before),
        "after": list(move.after),
        "copied_bytes": move.copied_bytes,
    }


def _show_outcomes(planned: Sequence[Move], outcomes: Sequence[Outcome], options: _MoveOptions) -> None:
    if options.output is not Output.JSON:
        for one in outcomes:
            if one.error is not None:
                print_error(f"{one.move.topic}-{one.move.partition}: {one.error.message}")
        return
    from mansio.metadata.move_planner import copy_seconds

    executed = [
        {**_move_row(one.move), "error": None if one.error is None else one.error.message} for one in outcomes
    ]
    show_json(
        {
            "planned": [_move_row(move) for move in planned],
            "copied_bytes": sum(move.copied_bytes for move in planned),
            "seconds": None if options.throttle is None else copy_seconds(planned, options.throttle),
            "executed": executed,
        }
    )


def _check_left(load: ClusterLoad, node_id: int) -> None:
    """Fail if a broker has replicas that could not be moved."""
    left = [one for one in load.partitions if node_id in one.replicas]
    if left:
        raise typer.Exit(
            print_error(
                f"broker {node_id} still has {count_text(len(left), 'replica')}, the first of"
                f" {left[0].topic}-{left[0].partition}: run the command again when the partitions have leaders"
            )
        )


def _confirm_unclean_election(topics: Sequence[str], *, is_sure: bool) -> None:
    """Print what an unclean election may lose, and ask for confirmation unless `is_sure` is true."""
    if not topics:
        usage_error("requires --topic", "--unclean")
    confirm(f"unclean election of {', '.join(topics)}: {UNCLEAN_WARNING}", is_sure=is_sure)


def _select_partitions(partitions: Sequence[PartitionStatus], indexes: Sequence[int]) -> list[TopicPartition]:
    from mansio.client.types import TopicPartition

    there = [TopicPartition(one.topic, one.partition) for one in partitions]
    if not indexes:
        return there
    missing = sorted(set(indexes) - {one.partition for one in there})
    if missing:
        usage_error(f"{there[0].topic} has no partition {missing[0]}", "--partition")
    return [one for one in there if one.partition in indexes]


async def _describe_cluster(
    bootstrap_servers: str,
) -> tuple[ClusterStatus, list[PartitionStatus], list[BrokerHealth]]:
    async with connect(bootstrap_servers) as client:
        cluster = client.admin.cluster
        return await cluster.status(), await cluster.partitions(), await cluster.health()


def session_fault(health: BrokerHealth) -> str:
    """Return a line about a broker whose session is not held, or that does not answer; empty if there is no such fault.
    An older broker, which has no health, has none."""
    from mansio.errors import UnsupportedVersion

    if health.error is not None:
        is_older = isinstance(health.error, UnsupportedVersion)
        return "" if is_older else f"broker {health.node_id} does not answer: {health.error.message}"
    if health.is_session_held:
        return ""
    since = health.session_lost_at
    reasons = [one.detail for one in health.problems if one.reason == "session_not_held"]
    when = "" if since is None else f" since {since:%Y-%m-%dT%H:%M:%SZ}"
    return ": ".join([f"broker {health.node_id} does not hold its session{when}", *reasons])


def status_row(
    cluster: ClusterStatus, partitions: Sequence[PartitionStatus], health: Sequence[BrokerHealth]
) -> dict[str, Any]:
    """Return the summary as the JSON output of `status` has it."""
    there = {one.node_id for one in cluster.brokers}
    return {
        "cluster_id": cluster.cluster_id,
        "controller": cluster.controller_id if cluster.controller_id in there else None,
        "brokers": len(cluster.brokers),
        "fenced": sum(one.is_fenced for one in cluster.brokers),
        "no_session": sum(not one.is_session_held for one in health),
        "topics": len({one.topic for one in partitions}),
        "partitions": len(partitions),
        "offline": sum(one.is_offline for one in partitions),
        "under_min_isr": sum(one.is_under_min_isr for one in partitions),
        "under_replicated": sum(one.is_under_replicated for one in partitions),
    }


def _broker_row(
    node_id: int,
    known: BrokerStatus | None,
    health: BrokerHealth | None,
    partitions: Sequence[PartitionStatus],
) -> dict[str, Any]:
    replica_brokers = [one for one in partitions if node_id in one.replicas]
    address = None
    if known is not None and known.host:  # the address of a fenced broker is unknown
        address = f"[{known.host}]:{known.port}" if ":" in known.host else f"{known.host}:{known.port}"
    return {
        "broker": node_id,
        "address": address,
        "rack": None if known is None else known.rack,
        "controller": known is not None and known.is_controller,
        "state": _broker_state(known, health),
        "leads": sum(one.leader == node_id for one in partitions),
        "replicas": len(replica_brokers),
        "not_in_sync": sum(node_id not in one.in_sync_replicas for one in replica_brokers),
    }


def _broker_state(known: BrokerStatus | None, health: BrokerHealth | None) -> str:
    if known is None:
        return "gone"
    if known.is_fenced:
        return "fenced"
    if health is None or not session_fault(health):
        return "ok"
    return "no session" if health.error is None else "no answer"


def _partition_row(one: PartitionStatus) -> dict[str, Any]:
    return {
        "topic": one.topic,
        "partition": one.partition,
        "leader": None if one.is_offline else one.leader,
        "leader_epoch": one.leader_epoch,
        "replicas": list(one.replicas),
        "in_sync": list(one.in_sync_replicas),
        "offline_replicas": list(one.offline_replicas),
        "min_in_sync": one.min_in_sync_replicas,
        "internal": one.is_internal,
        "state": str(_problems(one)[0]) if _problems(one) else "ok",
    }


def _problems(one: PartitionStatus) -> list[PartitionFilter]:
    """Return the problems of a partition, the most severe first."""
    found = {
        PartitionFilter.OFFLINE: one.is_offline,
        PartitionFilter.UNDER_MIN_IN_SYNC: one.is_under_min_isr,
        PartitionFilter.UNDER_REPLICATED: one.is_under_replicated,
    }
    return [kind for kind, is_so in found.items() if is_so]


def _matches_filter(one: PartitionStatus, only: PartitionFilter | None) -> bool:
    if only is None:
        return True
    return bool(_problems(one)) if only is PartitionFilter.ANY_PROBLEM else only in _problems(one)
