"""`mansio consume`: prints records, by default as raw values.

The command reads until Ctrl-C, as kcat does, unless `--exit-at-end`, `--to-time` or `--max` limits it.

Invariants:
* A group's committed offsets cover only records that were printed and flushed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.records.consume_shares import (
    Disposition,
    ShareConsumeCommand,
    check_share_group_options,
    select_disposition,
)
from mansio.cli.records.consume_snapshot import SnapshotConsumeCommand
from mansio.cli.support.archive_options import CatalogOption
from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    PartitionsOption,
    connect,
    parse_time,
    parse_time_option,
    run,
    unescape_separator,
    usage_error,
)
from mansio.cli.support.formatting import Output

if TYPE_CHECKING:
    from mansio.cli.support.formatting import RecordPrinter
    from mansio.cli.support.record_decoder import RecordDecoder
    from mansio.client import Client


def consume(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to read.")],
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            "-g",
            metavar="GROUP",
            help="Read as a member of this consumer group, and commit offsets.",
        ),
    ] = None,
    share_group: Annotated[
        str | None,
        typer.Option(
            "--share-group",
            "-G",
            metavar="GROUP",
            help="Read as a member of this share group.",
        ),
    ] = None,
    ack: Annotated[
        bool,
        typer.Option("--ack", help="With --share-group: acknowledge printed records. [the default]"),
    ] = False,
    release: Annotated[
        bool,
        typer.Option(
            "--release",
            help="With --share-group: release each record, for another delivery after the group's backoff.",
        ),
    ] = False,
    reject: Annotated[
        bool,
        typer.Option("--reject", help="With --share-group: reject each record to the dead-letter topic."),
    ] = False,
    hold: Annotated[
        bool,
        typer.Option(
            "--hold", help="With --share-group: keep each record leased until Ctrl-C, which releases it."
        ),
    ] = False,
    from_beginning: Annotated[
        bool,
        typer.Option(
            "--from-beginning",
            help="From the first record (a group: for partitions without committed offset).",
        ),
    ] = False,
    from_offset: Annotated[
        int | None,
        typer.Option(
            "--from-offset", metavar="N", help="From this offset; -N: the last N of each partition."
        ),
    ] = None,
    from_time: Annotated[
        str | None,
        typer.Option("--from-time", metavar="TIME", help="From the first record at or after this time."),
    ] = None,
    to_time: Annotated[
        str | None,
        typer.Option("--to-time", metavar="TIME", help="Stop before the first record at or after this time."),
    ] = None,
    exit_at_end: Annotated[
        bool, typer.Option("--exit-at-end", "-e", help="Stop at the current end; do not wait for more.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--max", "-n", min=0, metavar="N", help="Stop after this number of records.")
    ] = None,
    partition: PartitionsOption = None,
    key_separator: Annotated[
        str | None,
        typer.Option(
            "--key-separator", "-K", metavar="TEXT", help="Also print the key, followed by this separator."
        ),
    ] = None,
    delimiter: Annotated[
        str, typer.Option("--delimiter", "-D", metavar="TEXT", help="Printed after each value.")
    ] = r"\n",
    from_snapshot: Annotated[
        str | None,
        typer.Option(
            "--from-snapshot",
            metavar="ID|DATE",
            help="Read this version of the topic's archive: a snapshot's id, a tag, or a TIME.",
        ),
    ] = None,
    include_deleted: Annotated[
        bool,
        typer.Option(
            "--include-deleted",
            help="With --from-snapshot: include records that the topic has deleted since.",
        ),
    ] = False,
    warehouse: Annotated[
        str | None,
        typer.Option(
            "--warehouse", "-w", metavar="DIR", help="With --from-snapshot: location of the archive."
        ),
    ] = None,
    catalog: CatalogOption = None,
    schema_registry: Annotated[
        str | None,
        typer.Option(
            "--schema-registry",
            metavar="URL",
            help="Print keys and values decoded, as JSON, with the schemas of this registry, or 'brokers': that of the"
            " brokers. Credentials:"
            " MANSIO_SCHEMA_REGISTRY_USER, MANSIO_SCHEMA_REGISTRY_PASSWORD.",
        ),
    ] = None,
    output: Annotated[
        Output | None,
        typer.Option(
            "--output", "-o", help="json: one object per record; table: columns. [default: raw values]"
        ),
    ] = None,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Print the records of a topic, and wait for more until Ctrl-C.

    Starts at the end of the topic, or at its beginning with --exit-at-end or --to-time; a group resumes at its
    committed offsets. With --share-group any number of members share every partition, and records are acknowledged
    individually; --exit-at-end then ends when no record is available: all are processed, in backoff, or leased by
    other members. With --from-snapshot it prints the archive written by `mansio pipeline archive`, partition by
    partition, and ends.

    Records that cannot be read are skipped, with a line on standard error; the exit code is 1 then.

    Values are printed byte for byte. With --schema-registry they are decoded and printed as JSON; a record that cannot
    be decoded is printed as it is, with a line on standard error, and the exit code is 1.

    TIME is 2013-11-21T10:30:00Z (without a zone: local time), -15m, now, or milliseconds since the epoch. TEXT
    understands \\t, \\n, \\0 and \\xNN.
    """
    from mansio.cli.support.formatting import RecordPrinter

    if sum((from_beginning, from_offset is not None, from_time is not None)) > 1:
        usage_error("only one of --from-beginning, --from-offset, --from-time", "--from-...")
    if group is not None and (from_offset is not None or from_time is not None):
        usage_error(
            "a group starts at its committed offsets; change them with: mansio group reset-offsets", "--group"
        )
    if group is not None and partition:
        usage_error("a group assigns the partitions itself", "--partition")
    disposition = select_disposition(
        {
            Disposition.ACK: ack,
            Disposition.RELEASE: release,
            Disposition.REJECT: reject,
            Disposition.HOLD: hold,
        },
        share_group,
    )
    start_ms, stop_ms = parse_time_option(from_time, "--from-time"), parse_time_option(to_time, "--to-time")
    printer = RecordPrinter(
        output,
        delimiter=unescape_separator(delimiter),
        key_separator=None if key_separator is None else unescape_separator(key_separator),
    )
    decoder = None
    if schema_registry is not None:
        from mansio.cli.support.record_decoder import RecordDecoder

        if from_snapshot is not None:
            usage_error("an archive is decoded by the pipeline that writes it", "--schema-registry")
        decoder = RecordDecoder(schema_registry)
    if share_group is not None:
        given = {
            "--group": group is not None,
            "--partition": bool(partition),
            "--from-beginning": from_beginning,
            "--from-offset": from_offset is not None,
            "--from-time": start_ms is not None,
            "--to-time": stop_ms is not None,
            "--from-snapshot": from_snapshot is not None,
        }
        check_share_group_options(given, share_group)
        sharing = ShareConsumeCommand(topic, share_group, disposition, exit_at_end, limit, decoder)
        raise typer.Exit(run(sharing.perform(bootstrap_servers, printer)))
    if from_snapshot is not None:
        if group is not None or from_offset is not None:
            usage_error("an archive is read from its beginning, or from a time", "--from-snapshot")
        partitions = tuple(partition or ())
        SnapshotConsumeCommand(
            topic, from_snapshot, warehouse, catalog, include_deleted, partitions, start_ms, stop_ms, limit
        ).perform(bootstrap_servers, printer)
        return
    if include_deleted or warehouse is not None or catalog is not None:
        usage_error("requires --from-snapshot", "--include-deleted")
    if stop_ms is not None and stop_ms > parse_time("now"):
        usage_error("this time is in the future", "--to-time")
    has_end = exit_at_end or stop_ms is not None
    start: Any = "earliest" if from_beginning or has_end else "latest"
    if start_ms is not None:
        start = datetime.fromtimestamp(start_ms / 1000, UTC)
    elif from_offset is not None:
        start = from_offset
    command = ConsumeCommand(topic, tuple(partition or ()), group, start, stop_ms, has_end, limit, decoder)
    raise typer.Exit(run(command.perform(bootstrap_servers, printer)))


@dataclass(frozen=True, slots=True)
class ConsumeCommand:
    """A run of `mansio consume` without a share group. `start`: "earliest", "latest", a time, or an offset; a negative
    offset is relative to the end. `stop_ms`: time at which to stop. `has_end`: whether to stop at the current end.
    `decoder`: what decodes keys and values; None: they are printed as they are.
    """

    topic: str
    partitions: tuple[int, ...]
    group: str | None
    start: Any
    stop_ms: int | None
    has_end: bool
    limit: int | None
    decoder: RecordDecoder | None = None

    async def perform(self, bootstrap_servers: str, printer: RecordPrinter) -> int:
        """Print records until the end or the limit is reached, or until interrupted. Returns the exit code, 1 if
        records could not be read."""
        from mansio.cli.support.common import UnreadableReport, run_unless_deleted
        from mansio.client.types import TopicPartition

        report = UnreadableReport()
        async with connect(bootstrap_servers) as client:
            if self.decoder is not None:
                self.decoder.connect(client)
            consumer = client.consume(
                [TopicPartition(self.topic, index) for index in self.partitions] or self.topic,
                group=self.group,
                from_=await self._start(client),
                to_time=self.stop_ms,
                to_end=self.has_end and self.stop_ms is None,
                max_records=self.limit,
                auto_commit=self.group is not None,
                on_unreadable=report.show,
            )

            async def read() -> None:
                async with consumer:
                    async for messages in consumer.batches():
                        if self.decoder is None:
                            printer.show(messages)
                        else:
                            await self.decoder.show(printer, messages)

            await run_unless_deleted(client, self.topic, read())
        return report.exit_code or (0 if self.decoder is None else self.decoder.exit_code)

    async def _start(self, client: Client) -> Any:
        """Return the argument `from_` of `Client.consume`: an offset is converted to one for each partition, limited to
        its log.
        """
        from mansio.client.types import TopicPartition

        if not isinstance(self.start, int):
            return self.start
        topic = await client.admin.describe_topic(self.topic)
        every = [TopicPartition(self.topic, partition.index) for partition in topic.partitions]
        first = {
            one: entry.offset for one, entry in (await client.admin.list_offsets(every, "earliest")).items()
        }
        ends = {
            one: entry.offset for one, entry in (await client.admin.list_offsets(every, "latest")).items()
        }
        wanted = {one: self.start + (ends[one] if self.start < 0 else 0) for one in every}
        return {one: min(max(offset, first[one]), ends[one]) for one, offset in wanted.items()}
