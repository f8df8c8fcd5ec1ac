"""What Spark's own Kafka connector asked of a broker, byte for byte as it was on the wire, is answered.

The requests were recorded by `tests/nightly/spark/test_kafka_connector.py`, which runs the connector and
fails when it asks for something else.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mansio.wire.api_versions import ApiKey
from mansio.wire.batch.record_batch import build_batch
from support.paths import ROOT
from support.process import served
from support.raw_peer import RawPeer
from support.replay import replayed
from support.web_ui import read_golden

if TYPE_CHECKING:
    from pathlib import Path

GOLDEN = ROOT / "tests" / "golden" / "spark_kafka" / "connector.txt"
PARTITIONS = 2
ROWS = 300
"""What the recorded run of `tests/nightly/spark/kafka_connector.py` wrote."""


def test_every_request_of_sparks_own_connector_is_answered(tmp_path: Path) -> None:
    topic_ids, requests = read_golden(GOLDEN)
    assert {ApiKey(one.api_key) for one in requests} >= {
        ApiKey.API_VERSIONS,
        ApiKey.METADATA,
        ApiKey.LIST_OFFSETS,
        ApiKey.FETCH,
        ApiKey.INIT_PRODUCER_ID,
        ApiKey.PRODUCE,
    }
    with served(tmp_path / "data", http=False) as broker, RawPeer(broker.kafka_port) as raw:
        now_ms = int(time.time() * 1000)
        records = [(now_ms, b"key", b"value %d" % number, ()) for number in range(2 * ROWS)]
        for topic in topic_ids:
            raw.create_topic(topic, PARTITIONS)
            for partition in range(PARTITIONS):
                assert raw.produce(topic, build_batch(records), partition=partition).error_code == 0
        found = replayed(broker.kafka_port, topic_ids, requests)
        assert "Traceback" not in broker.text()
        assert broker.stop() == 0
    assert found == {api: {0} for api in found}
