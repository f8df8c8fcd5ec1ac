"""Asks a member of etcd how it is, over its own HTTP door.

`/health` answers true only when the member takes part in a majority: it reads through the consensus.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from mansio.node.etcd_member.command import TlsFiles

ANSWER_S_MAX: Final = 3.0
ANSWER_BYTES_MAX: Final = 64 << 10


async def unhealthy_reason_of(
    url: str, tls: ssl.SSLContext | None = None, *, wait_s: float = ANSWER_S_MAX
) -> str | None:
    """Why the member at `url` is not healthy, in a few words; None when it is."""
    place = urlsplit(url)
    try:
        async with asyncio.timeout(wait_s):
            reader, writer = await asyncio.open_connection(place.hostname, place.port, ssl=tls)
            try:
                writer.write(f"GET /health HTTP/1.0\r\nHost: {place.netloc}\r\n\r\n".encode())
                answer = await reader.read(ANSWER_BYTES_MAX)
            finally:
                writer.close()
    except TimeoutError:
        return f"no answer in {wait_s:.3g} s"
    except ssl.SSLError as error:
        return f"TLS: {error.reason or error}"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return _judgement(answer)


def _judgement(answer: bytes) -> str | None:
    _, _, body = answer.partition(b"\r\n\r\n")
    try:
        health = json.loads(body)
    except ValueError:
        return "what answers there is no etcd"
    if not isinstance(health, dict):
        return "what answers there is no etcd"
    if str(health.get("health")).lower() == "true":
        return None
    return str(health.get("reason") or "no majority of the members answers")


def tls_context(tls: TlsFiles) -> ssl.SSLContext:
    """Who asks shows the member's own certificate. Raises `OSError` for files that are not there or no PEM."""
    context = ssl.create_default_context(cafile=tls.ca_file)
    context.load_cert_chain(tls.cert_file, tls.key_file)
    return context
