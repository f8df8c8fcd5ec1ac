"""Mansio's own APIs: golden bytes, round trips, and malformed bytes."""

from __future__ import annotations

from random import Random

import pytest

from mansio.errors import WireError
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey, advertised_versions, is_flexible
from mansio.wire.apis import mansio_apis
from mansio.wire.codec import messages
from mansio.wire.codec.messages import REQUEST, RESPONSE, Struct
from unit.wire.kio_oracle import random_message

NATIVE = [api.key for api in SUPPORTED_APIS.values() if mansio_apis.is_mansio_api(api.key)]
BOTH = [(key, direction) for key in NATIVE for direction in (REQUEST, RESPONSE)]

ACKNOWLEDGE = {
    "group_id": "g",
    "member_id": "m",
    "topics": [
        {
            "topic_id": b"\x01" * 16,
            "partitions": [
                {
                    "partition_index": 3,
                    "batches": [
                        {
                            "first_offset": 5,
                            "last_offset": 6,
                            "types": b"\x02",
                            "delay_ms": 1000,
                            "reason": "r",
                            "delivery_count": 2,
                        }
                    ],
                }
            ],
        }
    ],
}
GOLDEN = (
    "0000004b 4e84 0000 00000007 0001 63 00"  # length, key 20100, version, correlation id, client "c", tags
    "02 67 02 6d 02 01010101010101010101010101010101 02 00000003"  # "g", "m", one topic, one partition
    "02 0000000000000005 0000000000000006 02 02 00000000000003e8 02 72 00000002 00 00 00 00"
)


def test_the_bytes_of_a_request_to_acknowledge_leases() -> None:
    assert messages.encode_request(ApiKey.ACKNOWLEDGE_RECORDS, 0, 7, "c", ACKNOWLEDGE) == bytes.fromhex(
        GOLDEN
    )


def test_they_are_announced_with_numbers_of_their_own() -> None:
    assert [key for key in advertised_versions() if key[0] >= 20_000] == [
        (20100, 0, 0),
        (20101, 0, 0),
        (20102, 0, 0),
        (20105, 0, 0),
        (20106, 0, 0),
        (20107, 0, 0),
        (20108, 0, 0),
        (20112, 0, 0),
        (20113, 0, 0),
        (20114, 0, 0),
        (20116, 0, 0),
        (20117, 0, 0),
        (20118, 0, 0),
        (20119, 0, 0),
        (20120, 0, 0),
        (20121, 0, 0),
        (20122, 0, 0),
        (20123, 0, 0),
        (20125, 0, 0),
        (20126, 0, 0),
        (20128, 0, 0),
        (20131, 0, 0),
        (20132, 0, 0),
        (20133, 0, 0),
        (20134, 0, 0),
        (20135, 0, 0),
    ]
    assert all(is_flexible(key, 0) for key in NATIVE)


def plain(value: object) -> object:
    if isinstance(value, Struct):
        return {name: plain(inner) for name, inner in vars(value).items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("key", "direction"), BOTH)
def test_what_is_written_is_read_again(key: int, direction: str) -> None:
    for seed in range(50):
        fields = random_message(Random(seed), messages._schema(key, 0, direction))
        out = bytearray()
        messages._writer(key, 0, direction)(out, fields)
        assert plain(messages._decode(key, 0, direction, bytes(out))) == fields


@pytest.mark.parametrize(("key", "direction"), BOTH)
def test_one_that_ends_too_early_is_refused(key: int, direction: str) -> None:
    fields = random_message(Random(4), messages._schema(key, 0, direction))
    out = bytearray()
    messages._writer(key, 0, direction)(out, fields)
    for length in range(len(out)):
        with pytest.raises(WireError):
            messages._decode(key, 0, direction, bytes(out[:length]))


def test_another_version_is_not_there() -> None:
    with pytest.raises(ValueError, match="version 1"):
        messages.encode_request(ApiKey.REDRIVE_RECORDS, 1, 7, "c", {})
