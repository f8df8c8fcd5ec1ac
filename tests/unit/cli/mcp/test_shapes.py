"""What of results goes into answers of `mansio mcp`: no key where none is asked for, also inside of a text."""

from __future__ import annotations

import json

import pytest

from mansio.cli.mcp.shapes import UNTRUSTED, explanation, hot_partition
from mansio.client.admin.explanations import GroupExplanation, GroupFinding
from mansio.client.admin.hot_partitions import HotKey, HotPartition
from mansio.state.blockage.record_rules import of_key_text
from mansio.state.hot_partitions.remedies import Remedy, RemedyKind

KEYS = (b"ann", "zoé 💥".encode(), b"\xff\x00", b"k" * 100, b"two\nlines")


def explained(key: bytes | None, text: str, summary: str) -> GroupExplanation:
    finding = GroupFinding(
        cause="key-in-flight",
        impact="blocks",
        is_certain=True,
        text=text,
        advice="let its member acknowledge or release it",
        command="mansio consume orders --partition 0 --from-offset 7 --max 1",
        records=3,
        topic="orders",
        partition=0,
        offset=7,
        member_id="m",
        client_id=None,
        principal=None,
        key=key,
        transactional_id=None,
        producer_id=None,
        schedule=None,
        evidence={"waiting": 3},
    )
    return GroupExplanation(
        "billing", "share", "Stable", "blocked", summary, 3, None, 1, (finding,), 0, 0, ()
    )


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("shows_values", [False, True])
def test_the_key_that_blocks_a_group_is_in_no_text(key: bytes, shows_values: bool) -> None:
    text = f"record orders-0@7{of_key_text(key)} is in flight and holds back 3 later ones of its key"
    found = explanation(explained(key, text, f"group billing is blocked: {text}"), shows_values=shows_values)
    assert found["summary"] == (
        "group billing is blocked: record orders-0@7 is in flight and holds back 3 later ones of its key"
    )
    (finding,) = found["findings"]
    assert (UNTRUSTED in finding) is shows_values
    finding.pop(UNTRUSTED, None)
    assert "key" not in finding
    assert of_key_text(key) not in json.dumps(found, ensure_ascii=False)


def test_a_text_that_shows_the_key_in_another_form_is_left_out() -> None:
    text = "record orders-0@7 (key 'secret') is in flight"
    for summary in (f"group billing is blocked: {text}", "group billing waits for 'secret'"):
        found = explanation(explained(b"secret", text, summary), shows_values=False)
        assert "secret" not in json.dumps(found)
        assert found["summary"] == "group billing is blocked: key-in-flight"


def test_a_finding_without_a_key_keeps_its_text() -> None:
    found = explanation(
        explained(None, "no member", "group billing is blocked: no member"), shows_values=True
    )
    assert found["summary"] == "group billing is blocked: no member"
    assert found["findings"][0]["text"] == "no member"
    assert UNTRUSTED not in found["findings"][0]


@pytest.mark.parametrize("shows_values", [False, True])
def test_a_hot_partition_has_the_shares_of_its_keys_and_the_keys_only_as_data(shows_values: bool) -> None:
    remedy = Remedy(RemedyKind.ISOLATE_KEY, "one key has 90% of the records", key=b"customer 7")
    found = hot_partition(
        HotPartition(
            topic="orders",
            partition=3,
            leader=1,
            rate=900.0,
            median_rate=10.0,
            topic_rate=930.0,
            partition_count=4,
            led_s=60.0,
            replicas=(1,),
            in_sync_replicas=(1,),
            is_compacted=False,
            key_access="shown",
            sampled_records=100,
            keys=(HotKey(b"customer 7", 0.9, 0.95),),
            remedies=(remedy,),
        ),
        shows_values=shows_values,
    )
    (key,) = found["keys"]
    assert (key["share_min"], key["share_max"]) == (0.9, 0.95)
    assert key.pop(UNTRUSTED, None) == ({"key": "customer 7"} if shows_values else None)
    assert "customer 7" not in json.dumps(found)
    assert found["remedies"][0]["kind"] == "isolate-key"
