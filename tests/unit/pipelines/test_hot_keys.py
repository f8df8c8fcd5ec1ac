"""Hot keys: a hot key is reported with a remedy, and random variation is not."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from mansio.pipelines.bar_charts import Bar, Chart, render_svg, render_text
from mansio.pipelines.hot_keys import (
    HotKeys,
    KeyLoad,
    PartitionLoad,
    assess_skew,
    hot_key_charts,
    key_label,
)
from mansio.wire.murmur2 import partition_for_key


def counted(keys: list[bytes], partitions: int, place: dict[bytes, int] | None = None) -> HotKeys:
    """What Spark counts, counted here. `place`: partitions that producers chose themselves."""
    chosen = [(place or {}).get(key, partition_for_key(key, partitions)) for key in keys]
    of_keys, of_partitions = Counter(keys), Counter(chosen)
    distinct = Counter(partition for _, partition in set(zip(keys, chosen, strict=True)))
    return HotKeys(
        records=len(keys),
        bytes=0,
        keys=len(of_keys),
        partitions=tuple(
            PartitionLoad(number, of_partitions[number], 0, distinct[number]) for number in range(partitions)
        ),
        top=tuple(KeyLoad(key, count, 0, 1) for key, count in of_keys.most_common(20)),
    )


def zipf(keys: int, records: int) -> list[bytes]:
    chance = random.Random(5)
    weights = [1 / rank for rank in range(1, keys + 1)]
    return [b"key-%04d" % number for number in chance.choices(range(keys), weights, k=records)]


def test_hot_key_is_named_with_how_far_to_split_it_and_what_partitions_can_do() -> None:
    found = counted(zipf(500, 20_000), 8)
    assessment = assess_skew(found)
    assert assessment.is_alarm
    assert assessment.hot[0].key == b"key-0000"
    assert any("key-0000" in line and "write it as" in line for line in assessment.advice)
    useful = found.records // found.top[0].records
    assert any(f"beyond {useful} partitions" in line for line in assessment.advice)


@pytest.mark.parametrize("partitions", [1, 4, 16])
@pytest.mark.parametrize("keys", [240, 20_000])
def test_even_keys_are_no_alarm(keys: int, partitions: int) -> None:
    chance = random.Random(6)
    assessment = assess_skew(counted([b"%d" % chance.randrange(keys) for _ in range(40_000)], partitions))
    assert not assessment.is_alarm
    assert assessment.advice == ()


def test_few_keys_are_distinguished_from_a_hot_one() -> None:
    place = {b"%d" % number: number % 3 for number in range(24)}
    assessment = assess_skew(counted([b"%d" % (number % 24) for number in range(2_400)], 12, place))
    assert assessment.is_skewed
    assert not assessment.hot
    assert "finer keys" in assessment.advice[0]


def test_records_that_are_not_placed_by_key_are_distinguished() -> None:
    keys = [b"%d" % (number % 5_000) for number in range(20_000)]
    place = dict.fromkeys(keys[:2500], 0)
    assessment = assess_skew(counted(keys, 4, place))
    assert assessment.is_skewed
    assert not assessment.hot
    assert "partitioner" in assessment.advice[0]


def test_empty_topic_is_no_alarm() -> None:
    assert not assess_skew(counted([], 3)).is_alarm


def test_picture_is_well_formed_whatever_the_keys_are() -> None:
    keys = [b"<&\"'>", b"\x00\xff" * 40, b"", "ä".encode() * 60, b"line\nbreak", b"\xed\xa0\x80"]
    found = counted([key for number, key in enumerate(keys, 1) for _ in range(number)], 2)
    drawn = hot_key_charts(found, assess_skew(found))
    root = ElementTree.fromstring(render_svg(drawn))
    bars = [
        float(one.attrib["width"])
        for one in root.iter("{http://www.w3.org/2000/svg}rect")
        if "x" in one.attrib
    ]
    assert len(bars) == len(keys) + 2
    assert bars[: len(keys)] == sorted(bars[: len(keys)], reverse=True)
    assert all("\n" not in line for chart in drawn for line in render_text(chart))
    assert key_label(None) == "(no key)"
    alike = [key_label(f"customers/europe/germany/{number:06}".encode()) for number in (1, 2)]
    assert alike == ["customers/eur…germany/000001", "customers/eur…germany/000002"]


def test_bars_are_to_scale() -> None:
    lines = render_text(Chart("t", [Bar("a", 80), Bar("b", 40, is_highlighted=True), Bar("c", 0)]), width=8)
    assert [line.count("█") for line in lines] == [0, 8, 4, 0]
    assert lines[2].startswith("! b")
