"""Frames out of a byte stream: a 4-byte length, then that many bytes.

One growing buffer per connection, filled by the socket itself (`asyncio.BufferedProtocol`), and views into it
handed out: a frame that arrives in one read is never copied. Owns the limit on a frame's size and on what a
connection may hold while it is idle.

Always true: memory follows what was received, not what was announced (a peer that announces 100 MB and sends
10 bytes costs one small buffer); feeding bytes one at a time gives the same frames as feeding them at once; a
view is valid until the next `get_buffer`.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from mansio.errors import FrameTooLarge

INITIAL_BYTES: Final = 64 * 1024
"""Size of a fresh buffer, and of one whose connection sends only small frames again."""
KEPT_BYTES: Final = 2 * 1024 * 1024
"""The largest buffer a connection keeps between two frames."""
SHRINK_AFTER_READS: Final = 64
"""A buffer that was mostly empty for so many reads goes back to `INITIAL_BYTES`."""

_LENGTH: Final = Struct(">i")


class FrameReader:
    """Cuts one connection's bytes into frames of at most `max_frame_bytes` (the length not counted)."""

    __slots__ = ("_buffer", "_end", "_quiet_reads", "_start", "_view", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._replace(INITIAL_BYTES)
        self._start = 0  # of the first byte not yet handed out
        self._end = 0  # of what was received
        self._quiet_reads = 0

    @property
    def buffered(self) -> int:
        """Bytes received that are not yet a whole frame."""
        return self._end - self._start

    @property
    def frame_bytes(self) -> int:
        """Size of the frame that is being received, as announced, with its length; 0 between frames."""
        if self._end - self._start < 4:
            return 0
        return 4 + int(_LENGTH.unpack_from(self._buffer, self._start)[0])

    @property
    def capacity(self) -> int:
        """Bytes of memory the buffer takes."""
        return len(self._buffer)

    def get_buffer(self, size_hint: int = -1) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Room for the next bytes of the stream, at least one. Ends the life of the views from before."""
        start, end = self._start, self._end
        if start == end:
            self._start = self._end = 0
            if len(self._buffer) > INITIAL_BYTES:
                self._shrink(end)
            return self._view
        if start:
            self._view[: end - start] = self._view[start:end]
            self._start, self._end = 0, end - start
            end = self._end
        if end == len(self._buffer):
            self._grow()
        return self._view[end:]

    def received(self, count: int) -> list[memoryview]:
        """The frames that are whole now that `count` more bytes stand in the buffer, without their lengths.

        Raises `FrameTooLarge` when the next length is negative or above the limit; the stream cannot be
        followed from there, and frames of the same read are lost with it.
        """
        start = self._start
        self._end = end = self._end + count
        frames = []
        while end - start >= 4:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if not 0 <= length <= self.max_frame_bytes:
                raise FrameTooLarge(f"a frame of {length} bytes; at most {self.max_frame_bytes} are accepted")
            stop = start + 4 + length
            if stop > end:
                break
            frames.append(self._view[start + 4 : stop])
            start = stop
        self._start = start
        return frames

    def let_go(self) -> None:
        """Give a grown buffer back, if no frame has begun. Ends the life of the views handed out before."""
        if self._start == self._end and len(self._buffer) > INITIAL_BYTES:
            self._start = self._end = 0
            self._replace(INITIAL_BYTES)

    def _replace(self, capacity: int) -> None:
        # A new object, because the old one cannot change its size while views into it are alive.
        self._buffer = bytearray(capacity)
        self._view = memoryview(self._buffer)

    def _grow(self) -> None:
        """Double, but not beyond the frame that is being received (which begins the buffer)."""
        held = self._view
        (length,) = _LENGTH.unpack_from(self._buffer, 0)
        self._replace(min(2 * len(held), 4 + length))
        self._view[: len(held)] = held
        self._quiet_reads = 0

    def _shrink(self, used: int) -> None:
        """Called between frames, the last of which ended at `used`: give back what is not needed."""
        capacity = len(self._buffer)
        self._quiet_reads = self._quiet_reads + 1 if used * 4 < capacity else 0
        if capacity > KEPT_BYTES or self._quiet_reads > SHRINK_AFTER_READS:
            self._replace(INITIAL_BYTES)
            self._quiet_reads = 0
