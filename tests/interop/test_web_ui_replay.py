"""What a real web UI asked of a broker, byte for byte as it was on the wire, is answered as it was then.

The requests were recorded by `test_web_ui.py`, which runs the UI and finds it out when the UI asks for something else.
Always true: only ids that a broker gives to topics are replaced before a request is sent again.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from e2e.raw_peer import RawPeer
from mansio.wire import fetch, messages, produce
from mansio.wire.records import build_batch
from mansio.wire.schemas import Struct
from mansio.wire.versions import ApiKey
from support.process import served
from support.web_ui import GOLDEN, read_golden

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from support.recording_proxy import Recorded

INVALID_REPLICATION_FACTOR = 38
SECURITY_DISABLED = 54
REFUSED = {
    ApiKey.CREATE_TOPICS: {0, INVALID_REPLICATION_FACTOR},
    ApiKey.DESCRIBE_ACLS: {SECURITY_DISABLED},
}
"""The APIs whose answers are not all 0, and the codes they hold; what Apache Kafka answers in the same case."""
RECORDS = 25
GROUPS = ("ui-live", "ui-empty")


def codes(value: object) -> Iterator[int]:
    """Every error code of an answer, however deep."""
    if isinstance(value, Struct):
        value = vars(value)
    if isinstance(value, dict):
        for name, inside in value.items():
            if name == "error_code":
                yield int(inside)
            else:
                yield from codes(inside)
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from codes(inside)


def decoded_codes(api: ApiKey, version: int, answer: bytes) -> set[int]:
    decoded: Any
    if api is ApiKey.PRODUCE:
        topics = produce.decode_response(version, answer).topics
        return {result.error_code for _, _, results in topics for result in results}
    if api is ApiKey.FETCH:
        decoded = fetch.decode_response(version, answer)
        return {decoded.error_code} | {one.error_code for topic in decoded.topics for one in topic[2]}
    return set(codes(messages.decode_response_frame(api, version, answer)[1]))


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


def with_ids_now(frame: bytes, topic_ids: Mapping[str, bytes], raw: RawPeer) -> bytes:
    """The frame with the ids that this broker has given to the topics named in it by id."""
    if any(recorded in frame for recorded in topic_ids.values()):
        for one in raw.call(ApiKey.METADATA, 12, {"topics": None}).topics:
            if one.name in topic_ids:
                frame = frame.replace(topic_ids[one.name], bytes(one.topic_id))
    return frame


def answered(waiting: list[tuple[RawPeer, Recorded]], found: dict[ApiKey, set[int]]) -> None:
    """Add the error codes of all answers that are waited for; there are none to wait for afterwards."""
    while waiting:
        peer, one = waiting.pop(0)
        api, answer = ApiKey(one.api_key), peer.frame()
        assert answer is not None, f"the broker closed the connection on {api.name} {one.version}"
        found[api] |= decoded_codes(api, one.version, answer)


@pytest.mark.row("A1")
def test_every_request_of_the_recorded_ui_is_answered(tmp_path: Path) -> None:
    topic_ids, requests = read_golden(GOLDEN)
    assert len(requests) > 20
    found: dict[ApiKey, set[int]] = defaultdict(set)
    with (
        served(tmp_path / "data", http=False) as broker,
        RawPeer(broker.kafka_port) as raw,
        ExitStack() as peers,
    ):
        prepare(raw)
        waiting: list[tuple[RawPeer, Recorded]] = []
        for one in requests:
            if one.api_key == ApiKey.DELETE_TOPICS:
                answered(waiting, found)
            peer = raw
            if one.api_key == ApiKey.FETCH:  # most wait at the end of a partition: all at the same time
                peer = peers.enter_context(RawPeer(broker.kafka_port))
            peer.send(with_ids_now(one.frame, topic_ids, raw))
            waiting.append((peer, one))
            if peer is raw:
                answered([waiting.pop()], found)
        answered(waiting, found)
        assert "Traceback" not in broker.text()
        assert broker.stop() == 0
    assert found == {api: REFUSED.get(api, {0}) for api in found}
