"""Fetch: the request that carries data out. Written by hand, because all that is read passes here.

Versions 4 to 17. Log start offset from 5, sessions from 7 (KIP-227), leader epoch from 9 (KIP-320), rack and preferred
replica from 11 (KIP-392), flexible (KIP-482) and last fetched epoch (KIP-595) from 12, topic ids from 13 (KIP-516), the
replica's id and broker epoch as a tagged field from 15 (KIP-903), the diverging epoch in the answer from 12 (KIP-595).
Other tagged fields are left out and skipped.
"""

from mansio.wire.apis.fetch_request import FetchPartition, FetchRequest, decode_request, encode_request
from mansio.wire.apis.fetch_response import FetchedPartition, FetchResponse, decode_response, encode_response

__all__ = [
    "FetchPartition",
    "FetchRequest",
    "FetchResponse",
    "FetchedPartition",
    "decode_request",
    "decode_response",
    "encode_request",
    "encode_response",
]
