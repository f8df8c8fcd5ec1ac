"""Records of the gRPC API: whichever way a request is decoded, its records are those of its fields."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from hypothesis import example, given
from hypothesis import strategies as st

from mansio.api.grpc import mansio_pb2 as pb
from mansio.api.grpc.conversion import new_records
from mansio.broker.services.publish_records import RecordToPublish, ValuesToPublish
from mansio.host.asyncio_loop import RunningLoop
from mansio.host.item_turns import ItemTurns

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = st.sampled_from([0, 1, 5, 125, 126, 127, 128, 129, 16_380, 16_384])
CONTENTS = st.one_of(SIZES.map(bytes), st.binary(max_size=4))
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "value": CONTENTS,
        "key": CONTENTS,
        "partition": st.integers(-2, 300),
        "timestamp_ms": st.integers(-2, 1 << 40),
        "delay_ms": st.integers(0, 5),
        "priority": st.sampled_from(["", "high"]),
        "dedup_id": st.binary(max_size=2),
        "headers": st.lists(st.just(pb.Header(name="h", value=b"")), max_size=1),
    },
)


def records_of(data: bytes) -> Sequence[RecordToPublish]:
    """Return the records of a request."""

    async def decode() -> Sequence[RecordToPublish]:
        return await new_records(pb.PublishRequest.FromString(data), ItemTurns(RunningLoop()))

    return asyncio.run(decode())


def record_of(fields: dict[str, Any]) -> RecordToPublish:
    headers = [(each.name, each.value) for each in fields.get("headers", ())]
    return RecordToPublish(**{"value": None} | fields | {"headers": headers})


@given(
    st.text(max_size=200),
    st.lists(st.one_of(FIELDS, CONTENTS.map(lambda value: {"value": value})), max_size=4),
)
@example("t", [{"partition": 1}])  # as long as an empty value
@example("t", [{"value": b"ab"}, {"value": b"a", "key": b""}])
@example("", [{"value": b"a", "key": b"b"}])
@example("t" * 128, [{"value": b"a" * 128}, {"value": b"a" * 127}])
def test_a_request_is_decoded_to_the_fields_that_it_has(topic: str, records: list[dict[str, Any]]) -> None:
    sent = pb.PublishRequest(topic=topic, records=[pb.NewRecord(**each) for each in records])
    found = records_of(sent.SerializeToString())
    assert [each._replace(headers=list(each.headers)) for each in found] == list(map(record_of, records))
    has_only_values = all(set(each) == {"value"} and each["value"] for each in records)
    assert isinstance(found, ValuesToPublish) == has_only_values


def test_an_unknown_field_hides_no_other_field() -> None:
    data = pb.PublishRequest(topic="t", records=[pb.NewRecord(value=b"a", key=b"k")]).SerializeToString()
    (found,) = records_of(data + b"\x78\x01")
    assert (found.value, found.key) == (b"a", b"k")
