"""Shared parts of the client commands: common options, connection, parsing of times and offsets.

Invariants:
* Importing this module imports only typer and the standard library.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, NoReturn, TypeVar

import typer

from mansio.errors import MansioError, UnknownTopicOrPartition

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from mansio.client import Client
    from mansio.errors import UnreadableRecords

T = TypeVar("T")

DEFAULT_BOOTSTRAP_SERVERS = "127.0.0.1:9092"
INTERRUPTED_EXIT_CODE = 130
TERMINATED_EXIT_CODE = 143
CONNECT_TIMEOUT_MS = 5_000
PARTITIONS_MAX = 1_000_000
"""Maximum of a partition number: above the limit of any broker, and within the integers of the protocol."""


def current_addresses() -> str | None:
    """Return the addresses of the user's current context; None if there is none. Raises `ConfigError`."""
    from mansio.net.contexts import load_contexts

    found = load_contexts().current_context()
    return None if found is None else found.bootstrap_servers


def _check_addresses(context: typer.Context, parameter: typer.CallbackParam, bootstrap_servers: str) -> str:
    """Check addresses; without any, take those of the user's current context."""
    from mansio.errors import ConfigError
    from mansio.net.addresses import parse_addresses

    source = context.get_parameter_source(parameter.name or "")
    if source is not None and source.name.startswith("DEFAULT"):
        bootstrap_servers = current_addresses() or bootstrap_servers
    try:
        parse_addresses(bootstrap_servers)
    except ConfigError as error:
        raise typer.BadParameter(error.message) from None
    return bootstrap_servers


BootstrapServersOption = Annotated[
    str,
    typer.Option(
        "--bootstrap-servers",
        "-b",
        envvar="MANSIO_BOOTSTRAP_SERVERS",
        metavar="HOST:PORT",
        callback=_check_addresses,
        help="Addresses of brokers (Kafka protocol), separated by commas; by default those of the current context.",
    ),
]

PartitionsOption = Annotated[
    list[int] | None,
    typer.Option(
        "--partition",
        "-p",
        min=0,
        max=PARTITIONS_MAX,
        metavar="N",
        help="Only this partition; repeatable.",
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Show what would be done without changing anything.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

TIME_UNIT_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
TIME_MS_MAX = 253_402_300_799_999
"""Milliseconds since the epoch at the end of the year 9999, the maximum of `datetime`."""
DURATION_PATTERN = re.compile(r"(\d+)(ms|s|m|h|d)")
RELATIVE_TIME_PATTERN = re.compile(r"([+-]\d+)(ms|s|m|h|d)")


def print_error(message: str) -> int:
    """Print an error as one line to standard error; returns 1, the exit code of a failure."""
    print(f"mansio: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return 1


class UnreadableReport:
    """Prints the offsets that cannot be read, for `on_unreadable` of a consumer. `exit_code`: 1 if there were any."""

    exit_code = 0

    def show(self, error: UnreadableRecords) -> None:
        """Print the offsets and the reason as one line to standard error."""
        self.exit_code = print_error(f"{error.message}; skipped")


async def run_for_each(names: Iterable[str], action: Callable[[str], Awaitable[None]]) -> None:
    """Call `action` for each name. A failure is printed, and the other names continue; raises `typer.Exit(1)` at the
    end then."""
    from mansio.errors import MansioError

    code = 0
    for name in names:
        try:
            await action(name)
        except MansioError as error:
            code = print_error(error.message)
    if code:
        raise typer.Exit(code)


def usage_error(message: str, hint: str) -> NoReturn:
    """Raise a usage error (exit code 2). `hint`: the option or argument that is wrong."""
    raise typer.BadParameter(message, param_hint=hint)


def confirm(effect: str, *, is_sure: bool) -> None:
    """Print what a command does, and ask for confirmation unless `is_sure`, the option `--yes`, is true."""
    print(f"mansio: {effect}", file=sys.stderr, flush=True)
    if is_sure:
        return
    if not sys.stdin.isatty():
        usage_error("confirmation requires a terminal; --yes confirms", "--yes")
    if not typer.confirm("Continue?", err=True):
        raise typer.Exit(print_error("nothing was changed"))


def connect(bootstrap_servers: str) -> Client:
    """Return a client of the cluster, to be used in `async with`, which raises `ConnectionLost` if no broker responds.
    Log lines of the client are not printed, because a command gets errors as exceptions. TLS, user and password come
    from the environment or from the context for these addresses.
    """
    import logging

    from mansio.client import connect as connect_client

    logging.getLogger("mansio").addHandler(logging.NullHandler())
    return connect_client(bootstrap_servers, client_id="mansio-cli", connect_timeout_ms=CONNECT_TIMEOUT_MS)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine and return its result. Ctrl-C and SIGTERM cancel it, so that it can clean up (for
    example leave its group); the exit code is then 130 or 143.
    """
    import asyncio

    try:
        return asyncio.run(_run_until_terminated(work))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


async def _run_until_terminated(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it at SIGTERM, as Ctrl-C does, unless another handler of SIGTERM is installed."""
    import asyncio

    is_ours = (
        sys.platform != "win32"  # asyncio handles no signals there; Ctrl-C raises KeyboardInterrupt
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not is_ours:
        return await work
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    is_terminated = False

    def terminate() -> None:
        nonlocal is_terminated
        if task is not None and not is_terminated:
            is_terminated = True
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await work
    except asyncio.CancelledError:
        if is_terminated:
            raise typer.Exit(TERMINATED_EXIT_CODE) from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def parse_time(text: str, now_ms: int | None = None) -> int:
    """Parse a time to milliseconds since the epoch; a time before the epoch becomes 0.

    Accepts milliseconds (`1384992000000`), ISO 8601 (`2013-11-21`, `2013-11-21T10:30:00Z`; without a zone local time),
    `now`, and a time before or after now (`-90s`, `-15m`, `-2h`, `+3d`). Raises `ValueError` for other text.
    """
    now = int(datetime.now(UTC).timestamp() * 1000) if now_ms is None else now_ms
    if text == "now":
        return now
    if text.isascii() and text.isdigit():
        if int(text) > TIME_MS_MAX:
            raise ValueError("later than the year 9999")
        return int(text)
    span = RELATIVE_TIME_PATTERN.fullmatch(text)
    if span:
        return max(0, now + int(int(span[1]) * TIME_UNIT_SECONDS[span[2]] * 1000))
    return max(0, int(datetime.fromisoformat(text).astimezone().timestamp() * 1000))


def parse_time_option(text: str | None, name: str) -> int | None:
    """Parse the time that the option `name` has (see `parse_time`); None if it is not given; exit code 2 if invalid."""
    if text is None:
        return None
    try:
        return parse_time(text)
    except (ValueError, OverflowError):
        usage_error(
            f"{text!r} is not a time; examples: 2013-11-21T10:30:00Z, -15m, now, or ms since the epoch", name
        )


def parse_duration_s(text: str, name: str, *, examples: str = "1h, 30m, 2d") -> float:
    """Parse the duration that the option `name` has, such as 1h, in seconds; exit code 2 if invalid."""
    found = DURATION_PATTERN.fullmatch(text.strip())
    if found is None:
        usage_error(f"{text!r} is not a duration; examples: {examples}", name)
    return int(found[1]) * TIME_UNIT_SECONDS[found[2]]


def parse_name_values(texts: Iterable[str], name: str) -> list[tuple[str, str]]:
    """Parse the `NAME=VALUE` texts of the option `name` to pairs, in order; exit code 2 if invalid."""
    pairs = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            usage_error(f"{text!r} is not NAME=VALUE", name)
        pairs.append((key, value))
    return pairs


def unescape_separator(text: str) -> bytes:
    r"""Convert a separator to bytes: `\n`, `\t`, `\r`, `\0`, `\\` and `\xNN` as in C; other characters in UTF-8."""
    return re.sub(
        rb"\\(x[0-9a-fA-F]{2}|[ntr0\\])",
        lambda found: _ESCAPES.get(found[1]) or bytes.fromhex(found[1][1:].decode()),
        os.fsencode(text),
    )


_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"0": b"\0", b"\\": b"\\"}


# -- offset specifications --------


TIME_HELP = (
    "a time (2013-11-21, -15m, or milliseconds since the epoch with an @ before them: @1384992000000)."
)
OFFSET_SPEC_HELP = f"earliest, latest, an offset (42), relative (+10, -10), or {TIME_HELP}"
OFFSET_MAX = (1 << 63) - 1
TIME_LIKE_OFFSET_MIN = 10**12
"""Minimum of an offset that may be meant as a time: as milliseconds it is a time after 2001, and offsets rarely are so
large.
"""


class OffsetSpec(NamedTuple):
    """A position in a log. `number`: an offset (`offset`), a number of records (`relative`), or milliseconds since the
    epoch (`time`).
    """

    kind: Literal["earliest", "latest", "offset", "relative", "time"]
    number: int = 0

    def arguments(self) -> dict[str, Any]:
        """Return the position as keyword arguments of `Admin.reset_offsets`."""
        if self.kind == "relative":
            return {"shift": self.number}
        if self.kind == "time":
            return {"to": datetime.fromtimestamp(self.number / 1000, UTC)}
        return {"to": self.number if self.kind == "offset" else self.kind}


def parse_offset_spec(text: str) -> OffsetSpec:
    """Parse `earliest`, `latest`, an offset (42), a relative offset (+10, -10), or a time (see `parse_time`). A number
    with `@` before it is milliseconds since the epoch. Raises `ValueError` for other text.
    """
    if text == "earliest":
        return OffsetSpec("earliest")
    if text == "latest":
        return OffsetSpec("latest")
    if re.fullmatch(r"[0-9]+", text):
        if int(text) > OFFSET_MAX:
            raise ValueError("larger than the maximum offset")
        return OffsetSpec("offset", int(text))
    if re.fullmatch(r"[+-][0-9]+", text):
        return OffsetSpec("relative", int(text))
    return OffsetSpec("time", parse_time(text.removeprefix("@")))


def missing_at_sign_hint(target: OffsetSpec) -> str | None:
    """Return a hint for the user if an offset is so large that it may be meant as a time; otherwise None."""
    if target.kind != "offset" or not TIME_LIKE_OFFSET_MIN <= target.number <= TIME_MS_MAX:
        return None
    return f"{target.number} is taken as an offset; milliseconds since the epoch are written @{target.number}"


# -- deletion of a topic that is read --------


TOPIC_POLL_INTERVAL_S: Final = 2.0
UNKNOWN_TOPIC_POLL_INTERVAL_S: Final = 0.25
UNKNOWN_TOPIC_S_MAX: Final = 1.0
"""Time for which a topic must be unknown to be considered deleted: a broker may not know a topic for a short time after
its creation or a metadata change.
"""


async def run_unless_deleted(client: Client, topic: str, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to completion, or cancel it and raise `UnknownTopicOrPartition` when the topic was deleted: a consumer
    would wait forever. An unreachable broker does not mean that the topic was deleted.
    """
    import asyncio

    reader = asyncio.create_task(work, name="reading")
    watch = asyncio.create_task(_wait_until_deleted(client, topic), name="topic-watch")
    try:
        await asyncio.wait((reader, watch), return_when=asyncio.FIRST_COMPLETED)
        if reader.done():
            return reader.result()
        watch.result()
    finally:
        reader.cancel()
        watch.cancel()
        await asyncio.gather(reader, watch, return_exceptions=True)
    raise UnknownTopicOrPartition(f"topic {topic} was deleted while it was being read")


async def _wait_until_deleted(client: Client, topic: str) -> None:
    """Return when the topic has been unknown to the brokers for `UNKNOWN_TOPIC_S_MAX`."""
    import asyncio

    loop = asyncio.get_running_loop()
    unknown_since: float | None = None
    while unknown_since is None or loop.time() - unknown_since < UNKNOWN_TOPIC_S_MAX:
        await asyncio.sleep(TOPIC_POLL_INTERVAL_S if unknown_since is None else UNKNOWN_TOPIC_POLL_INTERVAL_S)
        try:
            await client.admin.describe_topic(topic)
        except UnknownTopicOrPartition:
            unknown_since = loop.time() if unknown_since is None else unknown_since
        except MansioError:
            pass
        else:
            unknown_since = None
