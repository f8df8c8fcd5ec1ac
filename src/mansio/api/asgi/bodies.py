"""Bodies of requests: size, compression and memory are bounded.

Invariants:
* A body has at most `BODY_BYTES_MAX` bytes as sent and `DECODED_BYTES_MAX` decompressed; decompression stops there, and
  runs on a thread where it is not short.
* A body that is announced (Content-Length) with more bytes is refused before it is read.
* All bodies of a listener in memory are counted by its `RequestBudget`; a request that would exceed it gets 429.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from typing import TYPE_CHECKING, Final

from mansio.api.asgi.json_bodies import PIECE_BYTES
from mansio.api.asgi.problems import InvalidField
from mansio.errors import InvalidRecord, MansioError, MessageTooLarge, RequestError
from mansio.wire.batch import compression
from mansio.wire.batch.compression import Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from mansio.api.request_budget import RequestBudget

BODY_BYTES_MAX: Final = 16 << 20
DECODED_BYTES_MAX: Final = 16 << 20
SHORT_BYTES: Final = 4 << 10
"""A compressed body up to this size is decompressed on the event loop, up to `PIECE_BYTES`."""

_CODECS: Final = {"gzip": Codec.GZIP, "x-gzip": Codec.GZIP, "zstd": Codec.ZSTD}


class UnsupportedMediaType(RequestError):
    """The body has an encoding or type that is not supported."""

    http_status = 415


@contextlib.asynccontextmanager
async def read_body(request: Request, budget: RequestBudget) -> AsyncIterator[bytes]:
    """Read and decompress the body of a request; `budget` counts its memory until the end of the context.

    Raises `MessageTooLarge`, `UnsupportedMediaType`, `InvalidField`, `TooManyRequests`."""
    taken = 0
    try:
        parts: list[bytes] = []
        async for part in _parts(request):
            budget.take(len(part))
            taken += len(part)
            parts.append(part)
        data = b"".join(parts)
        parts.clear()
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            data = await _decompressed(data, encoding, budget)
            taken += len(data)
        yield data
    finally:
        budget.give_back(taken)


async def drop_body(request: Request) -> str:
    """Read the body of a request without keeping it, and return its SHA-256 in hexadecimal. Raises
    `MessageTooLarge`."""
    digest = hashlib.sha256()
    async for part in _parts(request):
        digest.update(part)
    return digest.hexdigest()


async def _parts(request: Request) -> AsyncIterator[bytes]:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > BODY_BYTES_MAX):
        raise MessageTooLarge(f"the body has more than {BODY_BYTES_MAX} bytes")
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > BODY_BYTES_MAX:
            raise MessageTooLarge(f"the body has more than {BODY_BYTES_MAX} bytes")
        yield part


async def _decompressed(data: bytes, encoding: str, budget: RequestBudget) -> bytes:
    """Return a body decompressed, and count its bytes."""
    if len(data) <= SHORT_BYTES:
        with contextlib.suppress(MessageTooLarge):
            found = decompress(data, encoding, min(PIECE_BYTES, DECODED_BYTES_MAX))
            budget.take(len(found))
            return found
    async with budget.turns:
        with budget.parsed(DECODED_BYTES_MAX):
            found = await asyncio.to_thread(decompress, data, encoding, DECODED_BYTES_MAX)
        budget.take(len(found))
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
