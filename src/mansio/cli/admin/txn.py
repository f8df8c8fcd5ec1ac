"""`mansio txn`: lists and describes transactions, and ends those that hang (Kafka's `kafka-transactions.sh`, KIP-664).

Invariants:
* `abort` refuses a transaction that its coordinator knows; `terminate` ends such a transaction as a whole.
* A change is made after a confirmation, or with `--yes`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    PARTITIONS_MAX,
    BootstrapServersOption,
    PartitionsOption,
    YesOption,
    confirm,
    connect,
    parse_duration_s,
    print_error,
    run,
    usage_error,
)
from mansio.cli.support.formatting import Output, OutputOption, format_cell, show_json, show_rows, show_table

if TYPE_CHECKING:
    from mansio.client.admin.transactions import TransactionDescription, TransactionListings
    from mansio.client.types import TopicPartition

app = typer.Typer(no_args_is_help=True, help="Show transactions, and end those that hang.")

LIST_COLUMNS: Final = ("transactional_id", "coordinator", "producer_id", "state")
DURATION_COLUMNS: Final = ("transactional_id", "coordinator", "producer_id", "state", "open")
PRODUCER_COLUMNS: Final = (
    "producer_id",
    "producer_epoch",
    "last_sequence",
    "last_batch",
    "coordinator_epoch",
    "transaction_start",
)
HANGING_COLUMNS: Final = (
    "topic",
    "partition",
    "start_offset",
    "producer_id",
    "producer_epoch",
    "transactional_id",
    "open",
)
LIST_TIMEOUT_MS: Final = 15_000
"""Timeout of the list: more than a cluster needs to declare a broker dead and to move its transactional ids."""

DEFAULT_OPEN_FOR: Final = "15m"

TransactionalIdArgument = Annotated[str, typer.Argument(metavar="ID", help="The transactional id.")]


@app.callback()
def command_group() -> None:
    """Show transactions, and end those that hang."""


@app.command("list")
def list_transactions(
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            "-s",
            metavar="STATE",
            help="Only this state: Empty, Ongoing, PrepareCommit, PrepareAbort, CompleteCommit or CompleteAbort; "
            "repeatable.",
        ),
    ] = None,
    producer_id: Annotated[
        list[int] | None,
        typer.Option("--producer-id", min=0, metavar="N", help="Only this producer id; repeatable."),
    ] = None,
    open_for: Annotated[
        str | None,
        typer.Option(
            "--open-for", metavar="DURATION", help="Only transactions open for longer, for example 15m."
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern", metavar="REGEX", help="Only ids that match this expression (RE2) as a whole."
        ),
    ] = None,
    durations: Annotated[
        bool,
        typer.Option("--durations", help="Show how long each transaction is open: a request per open one."),
    ] = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """List the transactional ids. The exit code is 1 if some are missing, because a coordinator did not answer."""
    open_ms_min = None if open_for is None else int(parse_duration_s(open_for, "--open-for") * 1000)

    async def work() -> tuple[TransactionListings, dict[str, int | None]]:
        from mansio.client.admin.transactions import OPEN_STATES
        from mansio.errors import TransactionalIdNotFound

        async with connect(bootstrap_servers) as client:
            found = await client.admin.transactions.list(
                states=state or (),
                producer_ids=producer_id or (),
                open_ms_min=open_ms_min,
                pattern=pattern,
                timeout_ms=LIST_TIMEOUT_MS,
            )
            started: dict[str, int | None] = {}
            for each in found:
                if durations and each.state in OPEN_STATES:
                    try:
                        described = await client.admin.transactions.describe(each.transactional_id)
                    except TransactionalIdNotFound:
                        continue  # it has expired
                    started[each.transactional_id] = described.started_ms if described.is_open else None
            return found, started

    found, started = run(work())
    rows: list[dict[str, Any]] = [
        {
            "transactional_id": each.transactional_id,
            "coordinator": each.coordinator_id,
            "producer_id": each.producer_id,
            "state": each.state,
        }
        for each in found
    ]
    if durations:
        for row in rows:
            open_ms = _age_ms(started.get(row["transactional_id"]))
            row |= {"open_ms": open_ms, "open": _duration_text(open_ms)}
    columns = DURATION_COLUMNS if durations else LIST_COLUMNS
    show_rows(output, rows, columns, empty="no transactional ids")
    if found.unreachable:
        silent = ", ".join(map(str, found.unreachable))
        raise typer.Exit(print_error(f"incomplete: broker {silent} did not answer"))
    if found.missing_partitions:
        missing = ", ".join(map(str, found.missing_partitions))
        raise typer.Exit(print_error(f"incomplete: partition {missing} of __transaction_state has no leader"))


@app.command()
def describe(
    transactional_id: TransactionalIdArgument,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Show a transactional id: its coordinator, producer, timeout, and the partitions of its transaction."""

    async def work() -> TransactionDescription:
        async with connect(bootstrap_servers) as client:
            return await client.admin.transactions.describe(transactional_id)

    found = run(work())
    open_ms = _age_ms(found.started_ms) if found.is_open else None
    row = {
        "transactional_id": found.transactional_id,
        "coordinator": found.coordinator_id,
        "state": found.state,
        "producer_id": found.producer_id,
        "producer_epoch": found.producer_epoch,
        "timeout_ms": found.timeout_ms,
        "started_ms": found.started_ms,
        "open_ms": open_ms,
        "partitions": [f"{topic}-{index}" for topic, index in found.partitions],
    }
    if output is Output.JSON:
        show_json(row)
        return
    shown = row | {"open": _duration_text(open_ms)}
    for name in ("coordinator", "state", "producer_id", "producer_epoch", "timeout_ms", "open", "partitions"):
        print(f"{name.replace('_', ' '):<15}  {format_cell(shown[name])}")


@app.command("describe-producers")
def describe_producers(
    topic: Annotated[str, typer.Option("--topic", "-t", metavar="TOPIC", help="The topic.")],
    partition: Annotated[
        int, typer.Option("--partition", "-p", min=0, max=PARTITIONS_MAX, metavar="N", help="The partition.")
    ],
    broker_id: Annotated[
        int | None,
        typer.Option(
            "--broker-id",
            min=0,
            metavar="N",
            help="Ask this broker, which has a replica, instead of the leader.",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Show the producers of a partition, with the offset at which the open transaction of each begins."""

    async def work() -> list[dict[str, Any]]:
        from mansio.client.types import TopicPartition

        one = TopicPartition(topic, partition)
        async with connect(bootstrap_servers) as client:
            found = await client.admin.transactions.describe_producers([one], node_id=broker_id)
        return [
            {
                "producer_id": each.producer_id,
                "producer_epoch": each.producer_epoch,
                "last_sequence": each.last_sequence,
                "last_timestamp_ms": each.last_timestamp_ms,
                "last_batch": f"{_duration_text(_age_ms(each.last_timestamp_ms))} ago",
                "coordinator_epoch": each.coordinator_epoch,
                "transaction_start": each.transaction_start_offset,
            }
            for each in found[one]
        ]

    show_rows(output, run(work()), PRODUCER_COLUMNS, empty="no producers")


@app.command("find-hanging")
def find_hanging(
    topic: Annotated[
        str | None, typer.Option("--topic", "-t", metavar="TOPIC", help="Only partitions of this topic.")
    ] = None,
    partition: PartitionsOption = None,
    broker_id: Annotated[
        int | None,
        typer.Option("--broker-id", min=0, metavar="N", help="Only partitions that this broker leads."),
    ] = None,
    open_for: Annotated[
        str,
        typer.Option(
            "--open-for",
            metavar="DURATION",
            help="Only producers without a batch for longer: at least the longest timeout of a transaction.",
        ),
    ] = DEFAULT_OPEN_FOR,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Find transactions that are open in a partition and that their coordinator does not know, so that nothing ends
    them. Readers of committed records wait at their first offset.

    Without options all partitions are checked.
    """
    open_ms_min = int(parse_duration_s(open_for, "--open-for") * 1000)
    if partition and topic is None:
        usage_error("requires --topic", "--partition")

    async def work() -> list[dict[str, Any]]:
        async with connect(bootstrap_servers) as client:
            found = await client.admin.transactions.find_hanging(
                _chosen(topic, partition), node_id=broker_id, open_ms_min=open_ms_min
            )
        return [
            {
                "topic": each.topic,
                "partition": each.partition,
                "start_offset": each.start_offset,
                "producer_id": each.producer_id,
                "producer_epoch": each.producer_epoch,
                "coordinator_epoch": each.coordinator_epoch,
                "transactional_id": each.transactional_id,
                "last_timestamp_ms": each.last_timestamp_ms,
                "open_ms": each.open_ms,
                "open": _duration_text(each.open_ms),
            }
            for each in found
        ]

    show_rows(output, run(work()), HANGING_COLUMNS, empty="no hanging transactions")


def _chosen(topic: str | None, partitions: list[int] | None) -> list[TopicPartition | str] | None:
    from mansio.client.types import TopicPartition

    if topic is None:
        return None
    return [TopicPartition(topic, each) for each in partitions] if partitions else [topic]


@app.command()
def abort(
    topic: Annotated[str, typer.Option("--topic", "-t", metavar="TOPIC", help="The topic.")],
    partition: Annotated[
        int, typer.Option("--partition", "-p", min=0, max=PARTITIONS_MAX, metavar="N", help="The partition.")
    ],
    start_offset: Annotated[
        int,
        typer.Option(
            "--start-offset",
            min=0,
            metavar="OFFSET",
            help="The offset at which the transaction begins, as `find-hanging` shows it.",
        ),
    ],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Abort it also if its coordinator knows it: the producer may then commit the other partitions.",
        ),
    ] = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Abort a hanging transaction in one partition: readers of committed records skip its records and go on. This
    cannot be undone.

    A transaction that its coordinator knows is refused without --force; use `terminate`.
    """
    confirm(
        f"the records of the transaction at offset {start_offset} of {topic}-{partition} are never delivered to "
        "readers of committed records",
        is_sure=yes,
    )

    async def work() -> dict[str, Any]:
        from mansio.client.types import TopicPartition

        async with connect(bootstrap_servers) as client:
            found = await client.admin.transactions.abort(
                TopicPartition(topic, partition), start_offset, force=force
            )
        return {
            "topic": topic,
            "partition": partition,
            "start_offset": start_offset,
            "producer_id": found.producer_id,
            "producer_epoch": found.producer_epoch,
        }

    row = run(work())
    if output is Output.JSON:
        show_json(row)
    else:
        show_table([*row], [[format_cell(each) for each in row.values()]])


@app.command()
def terminate(
    transactional_id: TransactionalIdArgument,
    yes: YesOption = False,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Abort the open transaction of a transactional id in all its partitions, and fence its producer, which fails from
    now on. This cannot be undone."""
    confirm(
        f"the open transaction of {transactional_id!r} is aborted, and its producer fails until it starts again",
        is_sure=yes,
    )

    async def work() -> None:
        async with connect(bootstrap_servers) as client:
            await client.admin.transactions.terminate(transactional_id)

    run(work())


def _age_ms(since_ms: int | None) -> int | None:
    return None if since_ms is None else max(time.time_ns() // 1_000_000 - since_ms, 0)


def _duration_text(duration_ms: int | None) -> str:
    """Return a duration in seconds, or in minutes and hours from an hour on; "" for None."""
    if duration_ms is None:
        return ""
    seconds = duration_ms // 1000
    if seconds < 60:
        return f"{duration_ms / 1000:.1f}s"
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
