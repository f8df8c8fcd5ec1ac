"""Sends again what a program asked of a broker, byte for byte as `recording_proxy` took it from the wire.

Always true: only ids that a broker gives to topics are replaced before a request is sent.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch, produce
from mansio.wire.codec import messages
from mansio.wire.codec.schema_compiler import Struct
from support.raw_peer import RawPeer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from support.recording_proxy import Recorded


def replayed(
    port: int, topic_ids: Mapping[str, bytes], requests: Sequence[Recorded]
) -> dict[ApiKey, set[int]]:
    """The error codes that the broker at `port` answers now, by API. Fails where it closes the connection."""
    found: dict[ApiKey, set[int]] = defaultdict(set)
    waiting: list[tuple[RawPeer, Recorded]] = []
    with RawPeer(port) as raw, ExitStack() as peers:
        for one in requests:
            if one.api_key == ApiKey.DELETE_TOPICS:
                _answered(waiting, found)
            peer = raw
            if one.api_key == ApiKey.FETCH:  # many wait at the end of a partition: all at the same time
                peer = peers.enter_context(RawPeer(port))
            peer.send(_with_ids_now(one.frame, topic_ids, raw))
            waiting.append((peer, one))
            if peer is raw:
                _answered([waiting.pop()], found)
        _answered(waiting, found)
    return found


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


def _decoded_codes(api: ApiKey, version: int, answer: bytes) -> set[int]:
    decoded: Any
    if api is ApiKey.PRODUCE:
        topics = produce.decode_response(version, answer).topics
        return {result.error_code for _, _, results in topics for result in results}
    if api is ApiKey.FETCH:
        decoded = fetch.decode_response(version, answer)
        return {decoded.error_code} | {one.error_code for topic in decoded.topics for one in topic[2]}
    return set(codes(messages.decode_response_frame(api, version, answer)[1]))


def _with_ids_now(frame: bytes, topic_ids: Mapping[str, bytes], raw: RawPeer) -> bytes:
    """The frame with the ids that this broker has given to the topics named in it by id."""
    if any(recorded in frame for recorded in topic_ids.values()):
        for one in raw.call(ApiKey.METADATA, 12, {"topics": None}).topics:
            if one.name in topic_ids:
                frame = frame.replace(topic_ids[one.name], bytes(one.topic_id))
    return frame


def _answered(waiting: list[tuple[RawPeer, Recorded]], found: dict[ApiKey, set[int]]) -> None:
    """Add the error codes of all answers that are waited for; there are none to wait for afterwards."""
    while waiting:
        peer, one = waiting.pop(0)
        api, answer = ApiKey(one.api_key), peer.frame()
        assert answer is not None, f"the broker closed the connection on {api.name} {one.version}"
        found[api] |= _decoded_codes(api, one.version, answer)
