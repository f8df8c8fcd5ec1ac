"""Baseline of a durable queue: decode the same frames, write the bytes once, respond. No checks, no index.

With `sync`, responses wait for an fdatasync that started after their write; one thread syncs for all waiting writes.
"""

import asyncio
import mmap
import os
import struct
import sys
import threading

import uvloop

INT, SHORT = struct.Struct(">i").unpack_from, struct.Struct(">h").unpack_from
PRODUCED = struct.Struct(">iihqqqi").pack
FETCH_HEAD, FETCHED = struct.Struct(">iiihii").pack, struct.Struct(">iihqqqiii").pack


class BaselineServer(asyncio.BufferedProtocol):
    file = mapped = waiting = wanted = None  # `waiting`: (transport, answers) for the next sync

    def connection_made(self, transport):
        self.transport, self.filled, self.offset = transport, 0, 0
        self.buffer = memoryview(bytearray(1 << 18))

    def get_buffer(self, hint):
        if self.filled == len(self.buffer):
            self.buffer = memoryview(bytearray(self.buffer) + bytearray(self.filled))
        return self.buffer[self.filled :]

    def buffer_updated(self, count):
        self.filled, begin, answers = self.filled + count, 0, []
        while self.filled - begin >= 4 and (end := begin + 4 + INT(self.buffer, begin)[0]) <= self.filled:
            answers += self.answer(self.buffer[begin + 4 : end])
            begin = end
        if 0 < begin < self.filled:
            self.buffer[: self.filled - begin] = bytes(self.buffer[begin : self.filled])
        self.filled -= begin
        if answers and BaselineServer.wanted:
            BaselineServer.waiting.append((self.transport, answers))
            BaselineServer.wanted.release()
        elif answers:
            self.transport.writelines(answers)

    def answer(self, frame):
        is_fetch, correlation = SHORT(frame, 0)[0], frame[4:8]
        name = (39 if is_fetch else 22) + SHORT(frame, 8)[0]  # of the topic, in Fetch 11 and Produce 7
        after = name + 2 + SHORT(frame, name)[0]
        topic, index = bytes(frame[name:after]), INT(frame, after + 4)[0]
        if is_fetch:
            BaselineServer.mapped = BaselineServer.mapped or memoryview(
                mmap.mmap(BaselineServer.file, 0, access=mmap.ACCESS_READ)
            )
            records = BaselineServer.mapped[: INT(frame, after + 28)[0]]
            length, id_ = 64 + len(topic) + len(records), INT(correlation)[0]
            tail = FETCHED(1, index, 0, 0, 0, 0, -1, -1, len(records))
            return FETCH_HEAD(length, id_, 0, 0, 0, 1), topic, tail, records
        self.offset += os.write(BaselineServer.file, frame[after + 12 :])
        body = b"".join((correlation, b"\0\0\0\1", topic, PRODUCED(1, index, 0, self.offset, -1, 0, 0)))
        return len(body).to_bytes(4, "big"), body


def sync_loop(loop):
    while BaselineServer.wanted.acquire():
        if BaselineServer.waiting:
            served, BaselineServer.waiting = BaselineServer.waiting, []
            os.fdatasync(BaselineServer.file)
            loop.call_soon_threadsafe(
                lambda them=served: [to.writelines(answers) for to, answers in them if not to.is_closing()]
            )


async def main(port, path, *modes):
    loop, BaselineServer.file = (
        asyncio.get_running_loop(),
        os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND),
    )
    if "sync" in modes:
        BaselineServer.waiting, BaselineServer.wanted = [], threading.Semaphore(0)
        threading.Thread(target=sync_loop, args=(loop,), daemon=True).start()
    await (await loop.create_server(BaselineServer, "127.0.0.1", int(port))).serve_forever()


uvloop.run(main(*sys.argv[1:]))
