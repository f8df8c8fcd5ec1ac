"""Log lines: one line per event, whatever text a client sent, and a limited number per peer."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.logs import COUNTS, KINDS_MAX, JsonFormatter, LineHandler, RateLimitFilter, TextFormatter, fields

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) ")
FORGERY = "x\n2026-01-01T00:00:00.000Z INFO broker_ready node=1\r\x1b[2K\u2028\u202e\x85"


class Sink:
    """A logger of its own over a text stream."""

    def __init__(self, name: str, formatter: logging.Formatter, gate: RateLimitFilter | None = None) -> None:
        self.stream = io.StringIO()
        self.handler = LineHandler(self.stream, gate)
        self.handler.setFormatter(formatter)
        self.logger = logging.Logger(name, logging.DEBUG)
        self.logger.addHandler(self.handler)

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def lines(self) -> list[str]:
        return self.text.splitlines()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def text() -> Sink:
    return Sink("mansio.node.broker", TextFormatter())


def test_event_is_one_line_with_its_fields(text: Sink) -> None:
    text.logger.info(
        "broker_ready", extra=fields(kafka="127.0.0.1:9092", node=1, rack=None, note="two words")
    )
    (line,) = text.lines()
    assert LINE.match(line)
    assert line.endswith('INFO broker_ready kafka=127.0.0.1:9092 node=1 rack=- note="two words"')


def test_plain_message_of_anybody_is_a_line_too_and_a_library_is_named() -> None:
    ours, library = Sink("mansio.storage.log", TextFormatter()), Sink("asyncio", TextFormatter())
    ours.logger.warning("%s: cut %d bytes", "data/topics/t", 7)
    library.logger.warning("slow callback")
    assert ours.text.endswith("WARNING data/topics/t: cut 7 bytes\n")
    assert library.text.endswith("WARNING asyncio: slow callback\n")


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_client_cannot_forge_a_line_or_move_the_cursor(formatter: logging.Formatter) -> None:
    sink = Sink("mansio.node.broker", formatter)
    sink.logger.warning("request_rejected", extra=fields(client_id=FORGERY))
    sink.logger.warning("group %s could not be stored", FORGERY)
    assert len(sink.lines()) == 2
    assert sink.text.count("\n") == 2
    assert sink.text.replace("\n", "").isprintable()


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_two_values_are_distinguished_from_fields_that_were_not_written(first: str, second: str) -> None:
    sink = Sink("mansio.node.broker", TextFormatter())
    sink.logger.info("event", extra=fields(a=first, b=second))
    assert sink.text.count("\n") == 1
    assert len(sink.lines()) == 1
    line = sink.text.rstrip("\n").split(" event ", 1)[1]
    assert re.fullmatch(r'a=([^\s"=]+|"([^"\\]|\\.)*") b=([^\s"=]+|"([^"\\]|\\.)*")', line), line


@given(st.text(max_size=60))
def test_json_gives_back_exactly_what_was_written(value: str) -> None:
    sink = Sink("mansio.node.broker", JsonFormatter())
    sink.logger.info("event", extra=fields(value=value, level="not this one", count=3))
    (line,) = sink.text.rstrip("\n").split("\n")
    found = json.loads(line)
    assert (found["event"], found["level"], found["count"]) == ("event", "info", 3)
    assert found["level_"] == "not this one"
    assert found["value"] == value


def test_json_of_a_plain_message_has_a_stable_event_and_a_readable_message() -> None:
    sink = Sink("mansio.node.broker", JsonFormatter())
    sink.logger.error("%s: %s", "t-0", "gone")
    found = json.loads(sink.text)
    assert (found["event"], found["message"], found["logger"]) == (
        "%s: %s",
        "t-0: gone",
        "mansio.node.broker",
    )


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_defect_in_a_logging_call_does_not_cost_the_line(formatter: logging.Formatter) -> None:
    sink = Sink("mansio.node.broker", formatter)
    sink.logger.error("%d of %d", "one\n")
    assert len(sink.lines()) == 1
    assert "one" in sink.text


def test_values_are_cut_and_say_how_long_they_were(text: Sink) -> None:
    text.logger.info("event", extra=fields(value="y" * 100_000))
    assert len(text.text) < 2000
    assert "100000 characters" in text.text


def test_traceback_is_there_and_none_of_its_lines_looks_like_a_line_of_ours(text: Sink) -> None:
    try:
        raise ValueError(FORGERY)
    except ValueError:
        text.logger.exception("it failed")
    first, *others = text.text.rstrip("\n").split("\n")
    assert LINE.match(first)
    assert others
    assert all(line.startswith("    ") for line in others)


def test_peer_gets_one_line_per_kind_and_second_and_the_rest_is_counted() -> None:
    clock = Clock()
    sink = Sink("mansio.api.kafka.connections.connection", TextFormatter(), RateLimitFilter(monotonic=clock))
    before = COUNTS.held_back
    for number in range(1000):
        sink.logger.warning("connection_closed", extra=fields(peer=f"10.0.0.{number % 250}"))
    sink.logger.warning("another kind")
    assert [line.split(" WARNING ")[1] for line in sink.lines()] == [
        "connection_closed peer=10.0.0.0",
        "another kind",
    ]
    assert COUNTS.held_back - before == 999
    clock.now = 1.0
    sink.logger.warning("connection_closed", extra=fields(peer="10.0.0.9"))
    assert sink.lines()[-1].endswith("connection_closed peer=10.0.0.9 held_back=999")


def test_last_of_the_held_back_lines_comes_out_when_nothing_more_happens() -> None:
    clock = Clock()
    sink = Sink("mansio.api.kafka.connections.connection", TextFormatter(), RateLimitFilter(monotonic=clock))
    for number in range(5):
        sink.logger.warning("connection_closed", extra=fields(number=number))
    sink.handler.write_suppressed()
    assert len(sink.lines()) == 1, "its second is not over"
    clock.now = 1.5
    sink.handler.write_suppressed()
    sink.handler.write_suppressed()
    assert [line.split(" WARNING ")[1] for line in sink.lines()] == [
        "connection_closed number=0",
        "connection_closed number=4 held_back=3",
    ]


def test_what_no_peer_can_cause_is_never_held_back(text: Sink) -> None:
    for number in range(50):
        text.logger.error("%s-%d is not served", "t", number)
    assert len(text.lines()) == 50


def test_number_of_log_line_kinds_is_bounded() -> None:
    clock = Clock()
    gate = RateLimitFilter(monotonic=clock)
    sink = Sink("uvicorn.error", TextFormatter(), gate)
    for number in range(KINDS_MAX + 500):
        sink.logger.warning(f"made up {number}")
    assert len(gate._kinds) <= KINDS_MAX + 1
    assert len(sink.lines()) <= KINDS_MAX + 1
