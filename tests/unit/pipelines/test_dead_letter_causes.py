"""Causes of dead letters, their ids, and the chunks of a redrive, without Spark and a broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from mansio.net.security_settings import SecuritySettings
from mansio.pipelines import dlq
from mansio.pipelines.dead_letter_causes import TEMPLATE_CHARACTERS_MAX, cause_of, reason_template
from mansio.wire.internal_records.dead_letter_headers import (
    CONSUMER_HEADER,
    DELIVERY_COUNT_HEADER,
    FIRST_MS_HEADER,
    GROUP_HEADER,
    ID_HEADER,
    MESSAGE_HEADER,
    OFFSET_HEADER,
    PARTITION_HEADER,
    REASON_HEADER,
    REJECTED_MESSAGE,
    TOPIC_HEADER,
    dead_letter_id,
    parse_dead_letter_headers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.net.redrive import RedriveCounts, SharePartitionId

TOPIC_ID = bytes(range(16))
BROKERS = dlq.Brokers("", SecuritySettings())


def headers(offset: int = 7, reason: str = "", group: str = "g") -> list[tuple[str, bytes | None]]:
    """The headers that the broker adds, after one of the record with the name of such a header."""
    added = {
        TOPIC_HEADER: "t",
        PARTITION_HEADER: "1",
        OFFSET_HEADER: str(offset),
        GROUP_HEADER: group,
        DELIVERY_COUNT_HEADER: "5",
        MESSAGE_HEADER: REJECTED_MESSAGE,
        ID_HEADER: dead_letter_id(group, TOPIC_ID, 1, offset, 5),
        CONSUMER_HEADER: "member",
        FIRST_MS_HEADER: "1000",
        **({REASON_HEADER: reason} if reason else {}),
    }
    return [(GROUP_HEADER, b"of the record"), *((name, value.encode()) for name, value in added.items())]


@pytest.mark.parametrize(
    ("reason", "template"),
    [
        ("no amount: -3.50 EUR", "no amount: <n> EUR"),
        ("order 6f1c2a34-0000-4000-8000-00000000beef\n unknown", "order <uuid> unknown"),
        ("object 0x7f3a at deadbeef01, 2013-01-01T10:00:00", "object <hex> at <hex>, <time>"),
        ("KeyError: 'amount'", "KeyError: 'amount'"),
        ("sha256 of utf8", "sha256 of utf8"),
        ("x" * 500, "x" * (TEMPLATE_CHARACTERS_MAX - 1) + "…"),
        ("", ""),
    ],
)
def test_reasons_that_differ_in_numbers_and_ids_have_one_template(reason: str, template: str) -> None:
    assert reason_template(reason) == template


def test_cause_is_stable_and_differs_by_group_and_reason() -> None:
    def cause(reason: str, group: str = "g") -> str:
        found = parse_dead_letter_headers(headers(reason=reason, group=group))
        assert found is not None
        return cause_of(found).id

    assert cause("row 1") == cause("row 23")
    assert cause("row 1") == "0e8b1c6d6e"
    assert len({cause("row 1"), cause("line 1"), cause("row 1", "other"), cause("")}) == 4


def test_headers_of_the_broker_win_over_those_of_the_record_and_other_records_are_no_dead_letters() -> None:
    found = parse_dead_letter_headers(headers())
    assert found is not None
    assert (found.group, found.topic_id, found.partition, found.offset, found.deliveries) == (
        "g",
        TOPIC_ID,
        1,
        7,
        5,
    )
    for missing in range(1, len(headers())):
        rest = [one for at, one in enumerate(headers()) if at != missing]
        if headers()[missing][0] in (ID_HEADER, PARTITION_HEADER, OFFSET_HEADER, FIRST_MS_HEADER):
            assert parse_dead_letter_headers(rest) is None
    assert parse_dead_letter_headers([("mansio-schema-error", b"x")]) is None


def rows(*places: tuple[str, int, int]) -> Iterator[pa.RecordBatch]:
    """Batches of two rows: group, topic "t", its id, partition, offset."""
    for at in range(0, len(places), 2):
        some = places[at : at + 2]
        yield pa.RecordBatch.from_pydict(
            {
                "group": [one[0] for one in some],
                "topic": ["t"] * len(some),
                "topic_id": [TOPIC_ID] * len(some),
                "partition": [one[1] for one in some],
                "offset": [one[2] for one in some],
            }
        )


def test_chunks_of_a_redrive_cover_each_row_once_and_mix_no_share_partitions() -> None:
    places = [("a", 0, 1), ("a", 0, 2), ("a", 0, 5), ("a", 1, 1), ("b", 1, 1), ("b", 1, 9), ("b", 1, 10)]
    found = [
        ((one.group, one.partition), offsets) for one, offsets in dlq.chunks(rows(*places), records_max=2)
    ]
    assert found == [
        (("a", 0), [1, 2]),
        (("a", 0), [5]),
        (("a", 1), [1]),
        (("b", 1), [1, 9]),
        (("b", 1), [10]),
    ]
    assert list(dlq.chunks(iter(()), records_max=2)) == []


def test_failed_share_partition_stops_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, list[int]]] = []

    def send(
        _brokers: dlq.Brokers, _id: str, one: SharePartitionId, offsets: list[int], total: RedriveCounts
    ) -> None:
        sent.append((one.group, offsets))
        if one.group == "a":
            total.error = "refused"
        else:
            total.redriven += len(offsets)

    monkeypatch.setattr(dlq, "REDRIVE_CHUNK_RECORDS", 1)
    monkeypatch.setattr(dlq, "redrive_chunk", send)
    places = [("a", 0, 1), ("a", 0, 2), ("b", 0, 1), ("b", 0, 2)]
    (batch,) = dlq.redrive_rows(BROKERS, "id", 0, False, rows(*places))
    found: list[dict[str, Any]] = batch.to_pylist()
    assert [(one["group"], one["records"], one["redriven"], one["error"]) for one in found] == [
        ("a", 2, 0, "refused"),
        ("b", 2, 2, None),
    ]
    assert sent == [("a", [1]), ("b", [1]), ("b", [2])]
    (dry,) = dlq.redrive_rows(BROKERS, "id", 0, True, rows(*places))
    assert [one["redriven"] for one in dry.to_pylist()] == [0, 0]
    assert list(dlq.redrive_rows(BROKERS, "id", 0, False, iter(()))) == []
