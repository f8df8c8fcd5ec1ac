"""Splitting of a connection's byte stream into frames: a 4-byte length, then that many bytes.

Bytes are read into a scratch buffer shared by all connections of a listener, and frames are returned as views of it: a
frame that arrives in one read is not copied, and an idle connection holds no memory. The start of the next frame that
remains after a read is copied out of the scratch buffer; a frame that takes several reads grows a private buffer of the
connection, which is kept while large frames continue to arrive.

Invariants:
* Memory grows with the received bytes, not with the announced length: a peer that announces 100 MB and sends 10 bytes
  occupies 10 bytes; at most `DETACHED_FRAME_BYTES_MAX` with `detaches_large_frames`.
* The frames do not depend on the sizes of the reads in which their bytes arrive.
* A view is valid until the next `get_buffer` of any reader that shares the scratch buffer, that is, until the next
  read. With `detaches_large_frames`, a view of a frame that exceeds the scratch buffer is valid as long as it is used.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from mansio.errors import FrameTooLarge

SCRATCH_BUFFER_BYTES: Final = 64 * 1024
"""Size of a scratch buffer, and minimum size of a private buffer, in bytes."""
PARTIAL_FRAME_BYTES_MAX: Final = 16 * 1024
"""An incomplete frame up to this size is copied back into the scratch buffer before the next read; a longer one gets a
private buffer."""
LENGTH_BYTES: Final = 4
"""Length of the prefix of a frame."""

IDLE_BUFFER_BYTES_MAX: Final = 2 * 1024 * 1024
"""Largest private buffer that a connection keeps between two frames."""
ATTACHED_FRAME_BYTES_MAX: Final = SCRATCH_BUFFER_BYTES - 4
"""Size of the largest frame that `detaches_large_frames` does not concern."""
DETACHED_FRAME_BYTES_MAX: Final = 8 * 1024 * 1024
"""A detached frame up to this size gets a buffer of its announced length at once; a larger one gets there by doubling.
"""
SHRINK_AFTER_READS: Final = 64
"""A private buffer is released after this many reads in a row that used less than a quarter of it."""

_LENGTH: Final = Struct(">i")


def new_scratch_buffer() -> memoryview:
    """Allocate the scratch buffer that all `FrameReader`s of one event loop share."""
    return memoryview(bytearray(SCRATCH_BUFFER_BYTES))


class FrameReader:
    """Splits one connection's byte stream into frames of at most `frame_bytes_max`, without the length.

    `scratch`: buffer from `new_scratch_buffer` that other readers on the same event loop use as well; with None, the
    reader allocates one for itself. `detaches_large_frames`: a frame that exceeds the scratch buffer gets a buffer of
    its own, which the caller keeps, so that it needs no copy.
    """

    __slots__ = (
        "_detaches",
        "_end",
        "_partial",
        "_scratch",
        "_start",
        "_underused_reads",
        "_view",
        "frame_bytes_max",
    )

    def __init__(
        self, frame_bytes_max: int, scratch: memoryview | None = None, *, detaches_large_frames: bool = False
    ) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._detaches = detaches_large_frames
        self._scratch = new_scratch_buffer() if scratch is None else scratch
        self._view = self._scratch  # or a private buffer
        self._partial = (
            b""  # incomplete frame that is copied back into the scratch buffer before the next read
        )
        self._start = 0  # position of the first byte not yet returned
        self._end = 0  # end of the received bytes
        self._underused_reads = 0

    def allow(self, frame_bytes_max: int) -> None:
        """Accept frames of at most `frame_bytes_max` from the next read on."""
        self.frame_bytes_max = frame_bytes_max

    @property
    def buffered_bytes(self) -> int:
        """Number of received bytes that belong to an incomplete frame."""
        return self._end - self._start

    @property
    def frame_bytes(self) -> int:
        """Size of the incomplete frame, including its 4-byte length; 0 before these 4 bytes have arrived."""
        if self._end - self._start < 4:
            return 0
        return 4 + int(_LENGTH.unpack_from(self._partial or self._view, self._start)[0])

    @property
    def private_buffer_bytes(self) -> int:
        """Memory in bytes that this reader has allocated apart from the scratch buffer."""
        return len(self._partial) if self._view is self._scratch else len(self._view)

    def get_buffer(self, size_hint: int = -1) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Return the buffer for the next read, at least one byte long. Frames returned earlier become invalid."""
        view = self._view
        if view is self._scratch:
            partial = self._partial
            if not partial:
                return view
            view[: len(partial)] = partial
            return view[len(partial) :]
        return self._get_private()

    def buffer_updated(self, byte_count: int) -> list[memoryview]:
        """Return the frames that are complete after a read of `byte_count` bytes into the buffer, without their
        lengths.

        Raises `FrameTooLarge` if a frame's length is negative or above the limit: the connection must be closed, and
        complete frames of the same read are dropped.
        """
        view = self._view
        start = self._start
        end = self._end + byte_count
        frames = []
        while end - start >= 4:
            (length,) = _LENGTH.unpack_from(view, start)
            if not 0 <= length <= self.frame_bytes_max:
                raise FrameTooLarge(_too_large(length, self.frame_bytes_max))
            stop = start + 4 + length
            if stop > end:
                break
            frames.append(view[start + 4 : stop])
            start = stop
        if self._detaches and start == end == len(view) > SCRATCH_BUFFER_BYTES:
            self._use_scratch(b"")
            start = end = 0
        elif view is self._scratch:
            if start == end:
                self._partial = b""
                start = end = 0
            else:
                end = self._save_partial(view[start:end])
                start = 0
        self._start = start
        self._end = end
        return frames

    def release_memory(self) -> None:
        """Release unused memory of an idle connection. Frames returned earlier become invalid."""
        if self._view is self._scratch:
            return
        partial = self._view[self._start : self._end]
        if len(partial) <= PARTIAL_FRAME_BYTES_MAX:
            self._use_scratch(bytes(partial))
        elif len(partial) < len(self._view) // 2:
            self._allocate_private(partial, len(partial))
        else:
            return
        self._start, self._end = 0, len(partial)

    def _save_partial(self, partial: memoryview) -> int:
        """Copy an incomplete frame out of the scratch buffer, and return the number of copied bytes."""
        size = len(partial)
        if size <= PARTIAL_FRAME_BYTES_MAX:
            self._partial = bytes(partial)
        else:
            (length,) = _LENGTH.unpack_from(partial)
            self._partial = b""
            self._allocate_private(partial, max(self._grown(2 * size, 4 + length), SCRATCH_BUFFER_BYTES))
        return size

    def _get_private(self) -> memoryview:
        start, end = self._start, self._end
        view = self._view
        if start == end:
            self._start = self._end = 0
            if self._should_release(end):
                self._use_scratch(b"")
            return self._view
        if start:
            view[: end - start] = view[start:end]
            self._start, self._end = 0, end - start
            end = self._end
        if end == len(view):
            (length,) = _LENGTH.unpack_from(view)
            self._allocate_private(view, self._grown(max(2 * end, SCRATCH_BUFFER_BYTES), 4 + length))
        return self._view[end:]

    def _grown(self, doubled: int, needed: int) -> int:
        """Return the next capacity of a private buffer: the doubled size, but not beyond the frame being received,
        which takes `needed` bytes."""
        return needed if self._detaches and needed <= DETACHED_FRAME_BYTES_MAX else min(doubled, needed)

    def _should_release(self, used: int) -> bool:
        """Whether to release the private buffer between two frames. `used`: bytes that the last frame needed."""
        capacity = len(self._view)
        self._underused_reads = self._underused_reads + 1 if used * 4 < capacity else 0
        return (
            not SCRATCH_BUFFER_BYTES < capacity <= IDLE_BUFFER_BYTES_MAX
            or self._underused_reads > SHRINK_AFTER_READS
        )

    def _allocate_private(self, content: memoryview, capacity: int) -> None:
        """Allocate a private buffer that starts with `content`. Always a new object, because a buffer cannot be resized
        while views of it exist."""
        self._view = memoryview(bytearray(capacity))
        self._view[: len(content)] = content
        self._underused_reads = 0

    def _use_scratch(self, partial: bytes) -> None:
        self._view = self._scratch
        self._partial = partial
        self._underused_reads = 0


def _too_large(length: int, limit: int) -> str:
    """Return the error message for an invalid frame length. If the 4 bytes begin a TLS or HTTP message, it names that
    protocol."""
    start = _LENGTH.pack(length)
    protocol = "TLS" if start[:2] in (b"\x15\x03", b"\x16\x03") else _FOREIGN_STARTS.get(start)
    if protocol is not None:
        return f"the peer uses {protocol}: check address and port"
    return f"a frame of {length} bytes; at most {limit} are accepted"


_FOREIGN_STARTS = dict.fromkeys((b"HTTP", b"GET ", b"POST", b"PUT ", b"HEAD"), "HTTP")
