"""`mansio consume --share-group`: prints leased records, then acknowledges, releases or rejects them.

Invariants:
* A record is acknowledged, released or rejected only after it was printed and the output was flushed.
* Leased records that were not printed, and records held by `--hold`, are released when the command ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from mansio.cli.support.common import connect, print_error, usage_error
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.cli.support.formatting import RecordPrinter
    from mansio.cli.support.record_decoder import RecordDecoder
    from mansio.client import Client, Leased, Receiver

POLL_TIMEOUT_MS: Final = 200
LEASED_RECORDS_MAX: Final = 500
"""Maximum number of records leased at a time."""
HELD_RECORDS_MAX: Final = 100_000
HELD_LEASE_MS_MAX: Final = 365 * 24 * 3600 * 1000


class Disposition(StrEnum):
    """What to do with a printed record."""

    ACK = "ack"
    RELEASE = "release"
    REJECT = "reject"
    HOLD = "hold"


def select_disposition(flags: Mapping[Disposition, bool], share_group: str | None) -> Disposition:
    """Return the disposition that the flags select; exit code 2 for several flags, and for a flag without a share
    group."""
    chosen = [disposition for disposition, is_given in flags.items() if is_given]
    if chosen and share_group is None:
        usage_error("this is for a share group: name it with --share-group", f"--{chosen[0]}")
    if len(chosen) > 1:
        usage_error("only one of --ack, --release, --reject, --hold", f"--{chosen[1]}")
    return chosen[0] if chosen else Disposition.ACK


def check_share_group_options(given: Mapping[str, bool], share_group: str) -> None:
    """Reject options that do not apply to share groups (exit code 2). `given`: whether each option was given."""
    for name, is_given in given.items():
        if is_given and name == "--group":
            usage_error("give either --group or --share-group", name)
        if is_given:
            begins = f"mansio group alter {share_group} share.auto.offset.reset=earliest"
            usage_error(f"does not apply to a share group; start position of a new group: {begins}", name)


@dataclass(frozen=True, slots=True)
class ShareConsumeCommand:
    """A run of `mansio consume --share-group`. `has_end`: whether to stop when no record is available. `decoder`: what
    decodes keys and values; None: they are printed as they are."""

    topic: str
    group: str
    disposition: Disposition
    has_end: bool
    limit: int | None
    decoder: RecordDecoder | None = None

    def __post_init__(self) -> None:
        if self.disposition is Disposition.HOLD and self.has_end:
            usage_error(
                "--hold ends with Ctrl-C only, because held records are released at the end", "--exit-at-end"
            )

    async def perform(self, bootstrap_servers: str, printer: RecordPrinter) -> int:
        """Print records until the end or the limit is reached, or until interrupted. Returns the exit code."""
        from mansio.cli.support.common import run_unless_deleted

        lost: list[Leased] = []
        async with connect(bootstrap_servers) as client:
            if self.decoder is not None:
                self.decoder.connect(client)
            await run_unless_deleted(client, self.topic, self._read(client, printer, lost))
        if lost:
            return print_error(
                f"{len(lost)} records were printed but not acknowledged: their leases had expired, and they will be"
                " delivered again"
            )
        return 0 if self.decoder is None else self.decoder.exit_code

    async def _read(self, client: Client, printer: RecordPrinter, lost: list[Leased]) -> None:
        is_held = self.disposition is Disposition.HOLD
        batch_max = HELD_RECORDS_MAX if is_held else LEASED_RECORDS_MAX
        receiver = client.receive(
            self.topic,
            group=self.group,
            max_records=max(1, batch_max if self.limit is None else min(self.limit, batch_max)),
            extend_max_ms=HELD_LEASE_MS_MAX,
        )
        async with receiver:
            remaining = self.limit
            while remaining is None or remaining > 0:
                messages = await receiver.poll(POLL_TIMEOUT_MS, max_records=remaining)
                if remaining is not None:
                    remaining -= len(messages)
                    if remaining == 0 and not is_held:
                        receiver.stop()  # lease no more than is printed
                if messages:
                    if self.decoder is None:
                        printer.show(messages)
                    else:
                        await self.decoder.show(printer, messages)
                    lost += await self._acknowledge(receiver, messages)
                elif self.has_end and await self._is_at_end(client, receiver):
                    return
            if is_held and self.limit:
                await _wait_forever()

    async def _acknowledge(self, receiver: Receiver, messages: Sequence[Leased]) -> list[Leased]:
        """Apply the disposition; returns the records whose leases had expired."""
        import asyncio

        from mansio.errors import LeaseLost

        if self.disposition is Disposition.HOLD:
            return []
        if self.disposition is Disposition.ACK:
            outcomes = [*await asyncio.gather(receiver.ack(messages), return_exceptions=True)]
        else:
            settlements = [
                one.retry() if self.disposition is Disposition.RELEASE else one.reject() for one in messages
            ]
            outcomes = [*await asyncio.gather(*settlements, return_exceptions=True)]
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, LeaseLost):
                raise copied(outcome)
        return [one for one in messages if not one.is_acknowledged]

    async def _is_at_end(self, client: Client, receiver: Receiver) -> bool:
        """Whether no record is available to any member, and this member has no leased record that is not printed."""
        from mansio.client.types import TopicPartition

        topic = await client.admin.describe_topic(self.topic)
        partitions = [TopicPartition(self.topic, one.index) for one in topic.partitions]
        for found in (await client.admin.shares.leases(self.group, partitions)).values():
            if found is None:
                return False  # no member has started to read it
            acquired = found.leased + found.in_backoff + found.withheld + found.archiving
            if found.lag > acquired or any(each.member_id == receiver.member_id for each in found.holders):
                return False
        return receiver.held_count == 0


async def _wait_forever() -> None:
    import asyncio

    await asyncio.Event().wait()
