"""Frames out of a byte stream: a 4-byte length, then that many bytes.

The bytes are read into a scratch buffer that all connections of a port share, and frames are handed out as views into
it: a frame that arrives in one read is never copied, and a connection between two frames holds no memory. What is left
of a read, the beginning of the next frame, is copied out of the scratch; a frame that takes several reads grows a
buffer of its connection's own, which is kept while large frames go on. Owns the limit on a frame's size and on what a
connection may hold while it is idle.

Always true: memory follows what was received, not what was announced (a peer that announces 100 MB and sends
10 bytes costs 10 bytes); feeding bytes one at a time gives the same frames as feeding them at once; a view is valid
until the next `get_buffer` of any reader that shares the scratch, that is, until the next read.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from mansio.errors import FrameTooLarge

SCRATCH_BYTES: Final = 64 * 1024
"""Size of the scratch buffer; and the least that is read at a time into a buffer of one's own."""
PARTIAL_FRAME_BYTES_MAX: Final = 16 * 1024
"""The beginning of a frame up to this size goes back into the scratch before the next read; a longer one gets a buffer
of its own."""
IDLE_BUFFER_BYTES_MAX: Final = 2 * 1024 * 1024
"""The largest buffer a connection keeps between two frames."""
SHRINK_AFTER_READS: Final = 64
"""A buffer that was mostly empty for so many reads is given back."""

_LENGTH: Final = Struct(">i")


def new_scratch() -> memoryview:
    """A scratch buffer for the readers of one loop."""
    return memoryview(bytearray(SCRATCH_BYTES))


class FrameReader:
    """Cuts one connection's bytes into frames of at most `max_frame_bytes` (the length not counted).

    `scratch` comes from `new_scratch` and is shared with other readers on the same loop; None: one of its own.
    """

    __slots__ = ("_end", "_held", "_quiet_reads", "_scratch", "_start", "_view", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int, scratch: memoryview | None = None) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._scratch = new_scratch() if scratch is None else scratch
        self._view = self._scratch  # or a buffer of its own
        self._held = b""  # received, and to be put back before the next read; only with the scratch
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
        return 4 + int(_LENGTH.unpack_from(self._held or self._view, self._start)[0])

    @property
    def capacity(self) -> int:
        """Bytes of memory that this reader holds for itself alone."""
        return len(self._held) if self._view is self._scratch else len(self._view)

    def get_buffer(self, size_hint: int = -1) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Room for the next bytes of the stream, at least one. Ends the life of the views from before."""
        view = self._view
        if view is self._scratch:
            held = self._held
            if not held:
                return view
            view[: len(held)] = held
            return view[len(held) :]
        return self._get_own()

    def received(self, count: int) -> list[memoryview]:
        """The frames that are whole now that `count` more bytes stand in the buffer, without their lengths.

        Raises `FrameTooLarge` when the next length is negative or above the limit; the stream cannot be
        followed from there, and frames of the same read are lost with it.
        """
        view = self._view
        start = self._start
        end = self._end + count
        frames = []
        while end - start >= 4:
            (length,) = _LENGTH.unpack_from(view, start)
            if not 0 <= length <= self.max_frame_bytes:
                raise FrameTooLarge(f"a frame of {length} bytes; at most {self.max_frame_bytes} are accepted")
            stop = start + 4 + length
            if stop > end:
                break
            frames.append(view[start + 4 : stop])
            start = stop
        if view is self._scratch:
            if start == end:
                self._held = b""
                start = end = 0
            else:
                end = self._keep_rest(view[start:end])
                start = 0
        self._start = start
        self._end = end
        return frames

    def release_memory(self) -> None:
        """Nothing came for a while: hold no more than what was received of a frame. Ends the life of the views
        handed out before."""
        if self._view is self._scratch:
            return
        rest = self._view[self._start : self._end]
        if len(rest) <= PARTIAL_FRAME_BYTES_MAX:
            self._back_to_scratch(bytes(rest))
        elif len(rest) < len(self._view) // 2:
            self._own(rest, len(rest))
        else:
            return
        self._start, self._end = 0, len(rest)

    def _keep_rest(self, rest: memoryview) -> int:
        """Take the beginning of a frame out of the scratch; its size."""
        size = len(rest)
        if size <= PARTIAL_FRAME_BYTES_MAX:
            self._held = bytes(rest)
        else:
            (length,) = _LENGTH.unpack_from(rest)
            self._held = b""
            self._own(rest, max(min(2 * size, 4 + length), SCRATCH_BYTES))
        return size

    def _get_own(self) -> memoryview:
        start, end = self._start, self._end
        view = self._view
        if start == end:
            self._start = self._end = 0
            if self._is_useless(end):
                self._back_to_scratch(b"")
            return self._view
        if start:
            view[: end - start] = view[start:end]
            self._start, self._end = 0, end - start
            end = self._end
        if end == len(view):
            # Double, but not beyond the frame that is being received.
            (length,) = _LENGTH.unpack_from(view)
            self._own(view, min(max(2 * end, SCRATCH_BYTES), 4 + length))
        return self._view[end:]

    def _is_useless(self, used: int) -> bool:
        """Between frames, the last of which ended at `used`: whether the buffer is not worth keeping."""
        capacity = len(self._view)
        self._quiet_reads = self._quiet_reads + 1 if used * 4 < capacity else 0
        return not SCRATCH_BYTES < capacity <= IDLE_BUFFER_BYTES_MAX or self._quiet_reads > SHRINK_AFTER_READS

    def _own(self, content: memoryview, capacity: int) -> None:
        """A buffer of its own that begins with `content`. A new object each time, because the old one cannot change
        its size while views into it are alive."""
        self._view = memoryview(bytearray(capacity))
        self._view[: len(content)] = content
        self._quiet_reads = 0

    def _back_to_scratch(self, held: bytes) -> None:
        self._view = self._scratch
        self._held = held
        self._quiet_reads = 0
