"""Structured logging: one line per event, as text or JSON, escaped and rate-limited.

An event is a stable name and fields:

    logger.info("broker_ready", extra=fields(kafka=address, node=1))

    2026-03-01T12:00:00.123Z INFO broker_ready kafka=127.0.0.1:9092 node=1
    {"time": "2026-03-01T12:00:00.123Z", "level": "info", "event": "broker_ready", "logger": "mansio.node.broker",
     "kafka": "127.0.0.1:9092", "node": 1}

A message with `%s` is an event, too: its name is the unformatted message. uvicorn, asyncio and other libraries use the
same handler; their lines contain the name of their logger.

Invariants:
* No text from outside can end a line, start another one or look like a field: control characters are escaped, values
  with blanks are quoted, the lines of a traceback are indented.
* Lines that a peer can cause at will are written at most once a second per kind; the next one contains the number of
  suppressed lines (`held_back`).
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FIELDS: Final = "mansio_fields"
VALUE_CHARACTERS_MAX: Final = 1000
MESSAGE_CHARACTERS_MAX: Final = 8000
PEER_INTERVAL_S: Final = 1.0
KINDS_MAX: Final = 1000

PEER_LOGGERS: Final = (
    "mansio.api.kafka.connections.connection",
    "mansio.api.kafka.server.listener",
    "mansio.api.kafka.server.request_router",
    "mansio.api.kafka.server.sasl_gate",
    "mansio.api.kafka.handlers",
    "mansio.broker.coordinator.group",
    "mansio.broker.services.api_keys",
    "mansio.broker.services.broker_authenticator",
    "mansio.broker.services.delegation_tokens",
    "mansio.broker.services.log_ins",
    "mansio.broker.services.sqs_access_keys",
    "mansio.net.connection_throttle",
    "mansio.net.tls.acceptor",
    "uvicorn",
)
"""Loggers whose lines are caused by requests or connections, so that a client can cause any number of them."""

_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\\\\\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_PLAIN_VALUE: Final = re.compile(r"[^\s\"=]+")
_RESERVED: Final = frozenset({"time", "level", "event", "message", "logger", "held_back", "exception"})


def fields(**values: object) -> dict[str, Any]:
    """Fields of an event, for the parameter `extra` of a logger. Values are formatted with `str`."""
    return {FIELDS: values}


def escaped(text: str, characters_max: int = VALUE_CHARACTERS_MAX) -> str:
    """`text` with all characters escaped that end a line, move the cursor or change the text direction."""
    return _UNSAFE.sub(_escape, _truncate(text, characters_max))


def _truncate(text: str, characters_max: int = VALUE_CHARACTERS_MAX) -> str:
    return text if len(text) <= characters_max else f"{text[:characters_max]}... ({len(text)} characters)"


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    if character == "\\":
        return "\\\\"
    code = ord(character)
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(
        character, f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    )


def _event_fields(record: logging.LogRecord) -> Mapping[str, object] | None:
    return getattr(record, FIELDS, None)


def _suppressed_count(record: logging.LogRecord) -> int:
    return getattr(record, "held_back", 0)


def _time_of(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _message(record: logging.LogRecord) -> str:
    """Return the formatted message; a defect in a logging call must not lose the line."""
    try:
        return record.getMessage()
    except (TypeError, ValueError):
        return f"{record.msg} {record.args!r}"


def _is_from_mansio(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == "mansio"


class TextFormatter(logging.Formatter):
    """Text lines: time (UTC), level, event, fields. A traceback follows on indented lines."""

    def format(self, record: logging.LogRecord) -> str:
        where = "" if _is_from_mansio(record) else f"{record.name}: "
        line = f"{_time_of(record)} {record.levelname} {where}{escaped(_message(record), MESSAGE_CHARACTERS_MAX)}"
        known = dict(_event_fields(record) or {})
        if count := _suppressed_count(record):
            known["held_back"] = count
        for name, value in known.items():
            line += f" {name}={_format_value(value)}"
        if record.exc_info and record.exc_info[0] is not None:
            traced = self.formatException(record.exc_info)
            line += "".join(f"\n    {escaped(part)}" for part in traced.split("\n"))
        return line


def _format_value(value: object) -> str:
    text = "-" if value is None else str(value)
    safe = escaped(text)
    if _PLAIN_VALUE.fullmatch(safe):
        return safe
    return '"' + safe.replace('"', '\\"') + '"'


class JsonFormatter(logging.Formatter):
    """One JSON object per line, in ASCII. `event` is a stable name, `message` the formatted text."""

    def format(self, record: logging.LogRecord) -> str:
        known = _event_fields(record)
        shown: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "event": _truncate(str(record.msg)),
            "logger": record.name,
        }
        if known is None:
            shown["message"] = _truncate(_message(record), MESSAGE_CHARACTERS_MAX)
        for name, value in (known or {}).items():
            shown[f"{name}_" if name in _RESERVED else name] = _json_value(value)
        if count := _suppressed_count(record):
            shown["held_back"] = count
        if record.exc_info and record.exc_info[0] is not None:
            shown["exception"] = _truncate(self.formatException(record.exc_info), MESSAGE_CHARACTERS_MAX)
        return json.dumps(shown)


def _json_value(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float) else _truncate(str(value))


class LogCounts:
    """Number of log lines by level, and of suppressed lines, for `/metrics`."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = dict.fromkeys(("debug", "info", "warning", "error", "critical"), 0)
        self.held_back = 0


COUNTS: Final = LogCounts()
"""Counts of this process."""


class _LineKind:
    """State of the rate limit of one kind of line. `due`: monotonic time from which the next line is written."""

    __slots__ = ("due", "last_record", "suppressed_count")

    def __init__(self) -> None:
        self.due = 0.0
        self.suppressed_count = 0
        self.last_record: logging.LogRecord | None = None


class RateLimitFilter(logging.Filter):
    """Rate limit: passes lines that a peer can cause once per `interval_s` and kind, and counts the others.

    A kind is a logger and an unformatted message, so their number is that of the logging calls in the source; if a
    library generates messages, those beyond `KINDS_MAX` share one kind.
    """

    def __init__(
        self, interval_s: float = PEER_INTERVAL_S, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._kinds: dict[tuple[str, str], _LineKind] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written. It gets the number of lines of its kind that were suppressed before."""
        if not record.name.startswith(PEER_LOGGERS) or getattr(record, "released", False):
            return True
        now = self._monotonic()
        with self._lock:
            kind = self._kind((record.name, str(record.msg)))
            if now < kind.due:
                kind.suppressed_count += 1
                kind.last_record = record
                COUNTS.held_back += 1
                return False
            kind.due = now + self._interval_s
            if kind.suppressed_count:
                record.held_back = kind.suppressed_count
                kind.suppressed_count, kind.last_record = 0, None
        return True

    def _kind(self, name: tuple[str, str]) -> _LineKind:
        found = self._kinds.get(name)
        if found is None:
            if len(self._kinds) >= KINDS_MAX:
                name = ("", "")
            found = self._kinds.setdefault(name, _LineKind())
        return found

    def release(self, *, at_end: bool = False) -> list[logging.LogRecord]:
        """Return the last suppressed line of each kind whose interval is over, to be written now.

        `at_end`: of all kinds, because the process ends.
        """
        now = self._monotonic()
        due = []
        with self._lock:
            for kind in self._kinds.values():
                if kind.suppressed_count and (at_end or now >= kind.due) and kind.last_record is not None:
                    record = kind.last_record
                    record.held_back = kind.suppressed_count - 1
                    record.released = True
                    kind.suppressed_count, kind.last_record = 0, None
                    kind.due = now + self._interval_s
                    due.append(record)
        return due


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes lines to a stream. The process calls `write_suppressed` about once a second."""

    def __init__(self, stream: TextIO | None = None, rate_limit: RateLimitFilter | None = None) -> None:
        super().__init__(stream)
        self._rate_limit = rate_limit or RateLimitFilter()
        self.addFilter(self._rate_limit)

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        if level in COUNTS.lines:
            COUNTS.lines[level] += 1
        super().emit(record)

    def write_suppressed(self, *, at_end: bool = False) -> None:
        """Write the last suppressed line of each kind whose interval is over; `at_end`: of all kinds."""
        for record in self._rate_limit.release(at_end=at_end):
            self.handle(record)


def set_level(level: str) -> None:
    """Change the level of the process's log lines, if `set_up` has been called: otherwise they belong to a program that
    embeds the broker."""
    root = logging.getLogger()
    if any(isinstance(handler, LineHandler) for handler in root.handlers):
        root.setLevel(level.upper())


def set_up(level: str, line_format: str, stream: TextIO | None = None) -> LineHandler:
    """Send the whole process's log lines to `stream` (standard error) as `line_format` (text or json)."""
    handler = LineHandler(stream)
    handler.setFormatter(JsonFormatter() if line_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    if level != "debug":
        for library in ("uvicorn", "asyncio"):
            logging.getLogger(library).setLevel(logging.WARNING)
    return handler
