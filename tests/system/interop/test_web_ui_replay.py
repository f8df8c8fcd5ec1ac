"""What a real web UI asked of a broker, byte for byte as it was on the wire, is answered as it was then.

The requests were recorded by `tests/nightly/interop/test_web_ui.py`, which runs the UI and fails when the UI asks for
something else.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from mansio.wire.api_versions import ApiKey
from mansio.wire.batch.record_batch import build_batch
from support.process import served
from support.raw_peer import RawPeer
from support.replay import codes, replayed
from support.web_ui import GOLDEN, read_golden

if TYPE_CHECKING:
    from pathlib import Path

INVALID_REPLICATION_FACTOR = 38
SECURITY_DISABLED = 54
GROUP_ID_NOT_FOUND = 69
REFUSED = {
    ApiKey.CREATE_TOPICS: {0, INVALID_REPLICATION_FACTOR},
    ApiKey.DESCRIBE_ACLS: {SECURITY_DISABLED},
    ApiKey.CONSUMER_GROUP_DESCRIBE: {GROUP_ID_NOT_FOUND},
}
"""The APIs whose answers are not all 0, and the codes they hold; what Apache Kafka answers in the same case. Its client
asks for every group in the new way first, and again in the old one for those that are classic.
"""
RECORDS = 25
GROUPS = ("ui-live", "ui-empty")


def prepare(raw: RawPeer) -> None:
    """The topics, records and groups that there were when the UI was recorded."""
    raw.create_topic("ui-plain", 3)
    raw.create_topic("ui-compacted", 1, cleanup_policy="compact")
    raw.create_topic("ui-many", 20)
    now_ms = int(time.time() * 1000)
    records = [(now_ms, b"key %d" % number, b"value %d" % number, ()) for number in range(RECORDS)]
    for topic in ("ui-plain", "ui-compacted", "ui-many"):
        assert raw.produce(topic, build_batch(records)).error_code == 0
    for group in GROUPS:
        partition = {"partition_index": 0, "committed_offset": 0, "committed_leader_epoch": -1}
        topics = [{"name": "ui-plain", "partitions": [partition]}]
        fields = {"group_id": group, "generation_id_or_member_epoch": -1, "member_id": "", "topics": topics}
        committed = raw.call(ApiKey.OFFSET_COMMIT, 8, fields)
        assert set(codes(committed)) == {0}


@pytest.mark.row("A1")
def test_every_request_of_the_recorded_ui_is_answered(tmp_path: Path) -> None:
    topic_ids, requests = read_golden(GOLDEN)
    assert len(requests) > 20
    with served(tmp_path / "data", http=False) as broker, RawPeer(broker.kafka_port) as raw:
        prepare(raw)
        found = replayed(broker.kafka_port, topic_ids, requests)
        assert "Traceback" not in broker.text()
        assert broker.stop() == 0
    assert found == {api: REFUSED.get(api, {0}) for api in found}
