"""Bodies of requests: size, compression and memory are bounded.

Invariants:
* A body has at most `BODY_BYTES_MAX` bytes as sent and `DECODED_BYTES_MAX` decompressed; decompression stops there, and
  runs on a thread where it is not short.
* A body that is announced (Content-Length) with more bytes is refused before it is read.
* All bodies in memory have at most `BUDGET_BYTES` together; a request that would exceed it gets 429.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from mansio.api.http.errors import TooManyRequests, UnsupportedMediaType
from mansio.api.http.problems import InvalidField
from mansio.api.http.v1.json_bodies import PIECE_BYTES
from mansio.api.turns import Turns
from mansio.errors import InvalidRecord, MansioError, MessageTooLarge
from mansio.wire.batch import compression
from mansio.wire.batch.compression import Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.requests import Request

BODY_BYTES_MAX: Final = 16 << 20
DECODED_BYTES_MAX: Final = 16 << 20
BUDGET_BYTES: Final = 256 << 20
SHORT_BYTES: Final = 4 << 10
"""A compressed body up to this size is decompressed on the event loop, up to `PIECE_BYTES`."""

_CODECS: Final = {"gzip": Codec.GZIP, "x-gzip": Codec.GZIP, "zstd": Codec.ZSTD}


class BodyBudget:
    """Bytes of the bodies that are in memory, and the turns of large ones."""

    __slots__ = ("turns", "used_bytes")

    def __init__(self) -> None:
        self.used_bytes = 0
        self.turns = Turns()

    def take(self, size_bytes: int) -> None:
        """Count bytes. Raises `TooManyRequests`."""
        if self.used_bytes + size_bytes > BUDGET_BYTES:
            raise TooManyRequests("the bodies of other requests use all memory that is reserved for them")
        self.used_bytes += size_bytes

    @contextlib.contextmanager
    def parsed(self, size_bytes: int) -> Iterator[None]:
        """Count what is parsed from a body of this size, until the end of the context. Raises `TooManyRequests`."""
        self.take(size_bytes)
        try:
            yield
        finally:
            self.used_bytes -= size_bytes

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """Read and decompress the body of a request; its memory is counted until the end of the context.

        Raises `MessageTooLarge`, `UnsupportedMediaType`, `InvalidField`, `TooManyRequests`."""
        taken = 0
        try:
            announced = request.headers.get("content-length", "")
            if announced.isdecimal() and (len(announced) > 18 or int(announced) > BODY_BYTES_MAX):
                raise MessageTooLarge(f"the body has more than {BODY_BYTES_MAX} bytes")
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
            parts.clear()
            encoding = request.headers.get("content-encoding", "identity").strip().lower()
            if encoding != "identity":
                data = await self._decompressed(data, encoding)
                taken += len(data)
            yield data
        finally:
            self.used_bytes -= taken

    async def _decompressed(self, data: bytes, encoding: str) -> bytes:
        """Return a body decompressed, and count its bytes."""
        if len(data) <= SHORT_BYTES:
            with contextlib.suppress(MessageTooLarge):
                found = decompress(data, encoding, min(PIECE_BYTES, DECODED_BYTES_MAX))
                self.take(len(found))
                return found
        async with self.turns:
            with self.parsed(DECODED_BYTES_MAX):
                found = await asyncio.to_thread(decompress, data, encoding, DECODED_BYTES_MAX)
            self.take(len(found))
            return found


def decompress(data: bytes, encoding: str, bytes_max: int) -> bytes:
    """Decompress a body, up to `bytes_max`.

    Raises `UnsupportedMediaType`, `MessageTooLarge`, `InvalidField`."""
    codec = _CODECS.get(encoding)
    if codec is None:
        raise UnsupportedMediaType(f"Content-Encoding {encoding[:40]!r}: gzip, zstd or none")
    try:
        return compression.decompress(codec, data, output_bytes_max=bytes_max)
    except InvalidRecord as error:
        raise MessageTooLarge(f"the decompressed body has more than {bytes_max} bytes") from error
    except MansioError as error:
        raise InvalidField("", f"the body is not {encoding}, as Content-Encoding says") from error
