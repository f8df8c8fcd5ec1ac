"""Produce for one partition, from the client's side: most requests of most producers.

Two such requests of a producer to one topic differ in the correlation id, the partition and the batch, and the answers
that say "stored" in three numbers. `SinglePartitionProduce` keeps the rest, so that neither is put together or
taken apart field by field; the broker's side of the same thought is `produce_pattern`.

Always true: `encode` gives the bytes of `produce.encode_request`; `decode_stored` answers only for frames that
`produce.decode_response` would read the same way, and None for every other, which then takes the long way.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from mansio.wire.api_versions import ApiKey
from mansio.wire.headers import request_header, unsigned_varint
from mansio.wire.primitives import (
    pack_compact_count,
    pack_compact_string,
    pack_count,
    pack_string,
    pack_topic,
)

if TYPE_CHECKING:
    from mansio.ports import Buffer

LOWEST_VERSION: Final = 8
_FLEXIBLE: Final = 9
_TOPIC_IDS: Final = 13
_AFTER_CORRELATION_ID: Final = 8
_NO_TAGS: Final = b"\x00\x00\x00"  # of the partition, of the topic, of the request

_INT: Final = Struct(">i")
_INT_INT: Final = Struct(">ii")
_ACKS: Final = Struct(">hi")


class SinglePartitionProduce:
    """Requests of one client, in one version (`LOWEST_VERSION` or higher), to one topic: by id from version 13 on."""

    __slots__ = (
        "_answer_bytes",
        "_head",
        "_is_flexible",
        "_middle",
        "_result_end",
        "_result_start",
        "_unpack",
    )

    def __init__(
        self,
        version: int,
        client_id: str | None,
        acks: int,
        timeout_ms: int,
        topic: str,
        topic_id: bytes,
    ) -> None:
        flexible = version >= _FLEXIBLE
        count = pack_compact_count if flexible else pack_count
        text = pack_compact_string if flexible else pack_string
        one_topic = count(1) + pack_topic(topic, topic_id, flexible=flexible, by_id=version >= _TOPIC_IDS)
        one_partition = one_topic + count(1)
        header = request_header(ApiKey.PRODUCE, version, 0, client_id)
        self._is_flexible = flexible
        self._head = header[: _AFTER_CORRELATION_ID - 4]
        self._middle = (
            header[_AFTER_CORRELATION_ID:] + text(None) + _ACKS.pack(acks, timeout_ms) + one_partition
        )
        self._result_start = (b"\x00" if flexible else b"") + one_partition
        # No record errors, no message; then the throttle time, which may be anything, and the tags around it.
        self._result_end = b"\x01\x00\x00\x00" if flexible else b"\x00\x00\x00\x00\xff\xff"
        starts, ends, tails = len(self._result_start), len(self._result_end), 1 if flexible else 0
        # Correlation id; index, error code, base offset, append time, log start offset; throttle time.
        answer = Struct(f">4x{starts}sihqq8x{ends}s4x{tails}s")
        self._unpack, self._answer_bytes = answer.unpack, answer.size

    def encode(self, correlation_id: int, partition: int, records: bytes) -> bytes:
        """The whole request, with its length."""
        middle = self._middle
        size = len(records)
        if self._is_flexible:
            length = unsigned_varint(size + 1)
            total = 15 + len(middle) + len(length) + size
            return b"".join(
                (
                    _INT.pack(total),
                    self._head,
                    _INT.pack(correlation_id),
                    middle,
                    _INT.pack(partition),
                    length,
                    records,
                    _NO_TAGS,
                )
            )
        return b"".join(
            (
                _INT.pack(16 + len(middle) + size),
                self._head,
                _INT.pack(correlation_id),
                middle,
                _INT_INT.pack(partition, size),
                records,
            )
        )

    def decode_stored(self, partition: int, frame: Buffer) -> tuple[int, int] | None:
        """(base offset, log append time in ms or -1) when the answer is that this partition's batch was stored, and
        no more than that; None otherwise."""
        if len(frame) != self._answer_bytes:
            return None
        start, index, error_code, base_offset, log_append_time_ms, end, tail = self._unpack(frame)
        if (
            error_code
            or index != partition
            or start != self._result_start
            or end != self._result_end
            or any(tail)
        ):
            return None
        return base_offset, log_append_time_ms
