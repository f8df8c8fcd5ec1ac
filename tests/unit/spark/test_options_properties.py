"""Any text as option of the Spark source and sink is parsed or refused with one line."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import ConfigError, InvalidRequest
from mansio.spark.options import SINK_OPTION_NAMES, SOURCE_OPTION_NAMES, SinkOptions, SourceOptions

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("0"), inner, max_size=3)
    ),
    max_leaves=6,
)
numbers = st.integers().map(str) | st.sampled_from(
    ["9" * 5_000, "1e5", "4MB", "15m", "-1", "9223372036854775808"]
)
texts = st.text(max_size=30) | json_values.map(json.dumps) | numbers
givens = st.dictionaries(
    st.sampled_from(sorted({*SOURCE_OPTION_NAMES, *SINK_OPTION_NAMES})), texts, max_size=4
)


def check_line(refusal: Exception) -> None:
    assert len(str(refusal).splitlines()) == 1
    assert len(str(refusal)) < 1_000


@given(givens, st.booleans())
def test_a_reader_takes_options_or_refuses_them_in_one_line(given_: dict[str, str], streaming: bool) -> None:
    base = {
        "kafka.bootstrap.servers": "a:1",
        **({} if set(given_) & {"subscribePattern", "assign"} else {"subscribe": "t"}),
    }
    try:
        parsed = SourceOptions.parse({**base, **given_}, streaming=streaming)
    except (ConfigError, InvalidRequest) as refused:
        check_line(refused)
        return
    for position in (parsed.starting_offsets, parsed.ending_offsets):
        moments = [position.timestamp_ms, *(position.timestamps_ms or {}).values()]
        assert all(moment is None or 0 <= moment < 1 << 63 for moment in moments)
        offsets = position.offsets.values() if isinstance(position.offsets, dict) else [position.offsets]
        assert all(-2 <= offset < 1 << 63 for offset in offsets)


@given(givens)
def test_a_writer_does_too(given_: dict[str, str]) -> None:
    try:
        SinkOptions.parse({"kafka.bootstrap.servers": "a:1", **given_})
    except ConfigError as refused:
        check_line(refused)
