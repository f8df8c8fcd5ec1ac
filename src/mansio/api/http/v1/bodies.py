"""Bodies of requests: size, compression and memory are bounded.

Invariants:
* A body has at most `BODY_BYTES_MAX` bytes as sent and `DECODED_BYTES_MAX` decompressed; decompression stops there.
* All bodies in memory have at most `BUDGET_BYTES` together; a request that would exceed it gets 429.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from mansio.api.http.errors import TooManyRequests, UnsupportedMediaType
from mansio.api.http.v1.problems import InvalidField
from mansio.errors import InvalidRecord, MansioError, MessageTooLarge
from mansio.wire.batch import compression
from mansio.wire.batch.compression import Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

BODY_BYTES_MAX: Final = 16 << 20
DECODED_BYTES_MAX: Final = 32 << 20
BUDGET_BYTES: Final = 256 << 20
_CODECS: Final = {"gzip": Codec.GZIP, "x-gzip": Codec.GZIP, "zstd": Codec.ZSTD}


class BodyBudget:
    """Bytes of the bodies that are in memory."""

    __slots__ = ("used_bytes",)

    def __init__(self) -> None:
        self.used_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Count bytes. Raises `TooManyRequests`."""
        if self.used_bytes + size_bytes > BUDGET_BYTES:
            raise TooManyRequests("the bodies of other requests use all memory that is reserved for them")
        self.used_bytes += size_bytes

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """Read and decompress the body of a request; its memory is counted until the end of the context.

        Raises `MessageTooLarge`, `UnsupportedMediaType`, `InvalidField`, `TooManyRequests`."""
        taken = 0
        try:
            parts: list[bytes] = []
            size = 0
            async for part in request.stream():
                size += len(part)
                if size > BODY_BYTES_MAX:
                    raise MessageTooLarge(f"the body has more than {BODY_BYTES_MAX} bytes")
                self.take(len(part))
                taken += len(part)
                parts.append(part)
            data = b"".join(parts)
            encoding = request.headers.get("content-encoding", "identity").strip().lower()
            if encoding != "identity":
                self.take(DECODED_BYTES_MAX)
                taken += DECODED_BYTES_MAX
                data = decompress(data, encoding)
                self.used_bytes -= DECODED_BYTES_MAX - len(data)
                taken -= DECODED_BYTES_MAX - len(data)
            yield data
        finally:
            self.used_bytes -= taken


def decompress(data: bytes, encoding: str) -> bytes:
    """Decompress a body, up to `DECODED_BYTES_MAX`.

    Raises `UnsupportedMediaType`, `MessageTooLarge`, `InvalidField`."""
    codec = _CODECS.get(encoding)
    if codec is None:
        raise UnsupportedMediaType(f"Content-Encoding {encoding[:40]!r}: gzip, zstd or none")
    try:
        return compression.decompress(codec, data, output_bytes_max=DECODED_BYTES_MAX)
    except InvalidRecord as error:
        raise MessageTooLarge(f"the decompressed body has more than {DECODED_BYTES_MAX} bytes") from error
    except MansioError as error:
        raise InvalidField("", f"the body is not {encoding}, as Content-Encoding says") from error
