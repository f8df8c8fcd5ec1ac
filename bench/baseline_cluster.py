"""Baseline of a three-way replicated log: decode the same frames, write the bytes, send them to two replicas that write
them too, respond when all three have synced. No checks, no index, no leader election.

Started three times, with a number, the client ports, the replica ports and a directory: each process is the leader for
its own clients and replicates the other two. Each file has one sync thread, which serves all waiting writes at once.
"""

import asyncio
import os
import struct
import sys
import threading
from collections import deque

import uvloop

INT, SHORT, END = struct.Struct(">i").unpack_from, struct.Struct(">h").unpack_from, struct.Struct(">q")
PRODUCED = struct.Struct(">iihqqqi").pack
FIRST_TOPIC = 22  # where the name's length is in Produce 7, behind the client id


class File:
    """File appended to on the loop and synced by a thread; `told` is called with each durable end."""

    def __init__(self, path, told):
        self.number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.end, self.told, self.wanted = 0, told, threading.Semaphore(0)
        threading.Thread(target=self.sync, args=(asyncio.get_running_loop(),), daemon=True).start()

    def write(self, piece):
        self.end += os.write(self.number, piece)
        self.wanted.release()

    def sync(self, loop):
        durable = 0
        while self.wanted.acquire():
            if (end := self.end) > durable:
                os.fdatasync(self.number)
                durable = end
                loop.call_soon_threadsafe(self.told, durable)


class Leader:
    """Log of one leader, and its end that is durable on all three processes."""

    def __init__(self, path):
        self.waiting, self.durable, self.copies = deque(), [0, 0, 0], []
        self.file = File(path, lambda end: self.reached(0, end))

    def reached(self, who, end):
        self.durable[who] = end
        everywhere = min(self.durable)
        while self.waiting and self.waiting[0][0] <= everywhere:
            _, transport, answer = self.waiting.popleft()
            if not transport.is_closing():
                transport.write(answer)


class Client(asyncio.BufferedProtocol):
    def __init__(self, leader):
        self.leader = leader

    def connection_made(self, transport):
        self.transport, self.filled = transport, 0
        self.buffer = memoryview(bytearray(1 << 18))

    def get_buffer(self, hint):
        if self.filled == len(self.buffer):
            self.buffer = memoryview(bytearray(self.buffer) + bytearray(self.filled))
        return self.buffer[self.filled :]

    def buffer_updated(self, count):
        self.filled, begin = self.filled + count, 0
        while self.filled - begin >= 4 and (end := begin + 4 + INT(self.buffer, begin)[0]) <= self.filled:
            self.produced(self.buffer[begin + 4 : end])
            begin = end
        if 0 < begin < self.filled:
            self.buffer[: self.filled - begin] = bytes(self.buffer[begin : self.filled])
        self.filled -= begin

    def produced(self, frame):
        leader, name = self.leader, FIRST_TOPIC + SHORT(frame, 8)[0]
        after = name + 2 + SHORT(frame, name)[0]
        topic, index = bytes(frame[name:after]), INT(frame, after + 4)[0]
        records = bytes(frame[after + 12 :])
        body = b"".join((frame[4:8], b"\0\0\0\1", topic, PRODUCED(1, index, 0, leader.file.end, -1, 0, 0)))
        leader.file.write(records)
        leader.waiting.append((leader.file.end, self.transport, len(body).to_bytes(4, "big") + body))
        for copy in leader.copies:
            copy.write(records)


class Copy(asyncio.Protocol):
    """The leader's end of a connection to a replica: sends bytes, receives durable ends."""

    def __init__(self, leader, who):
        self.leader, self.who, self.front = leader, who, b""

    def data_received(self, data):
        data = self.front + data
        whole = len(data) // 8 * 8
        self.front = data[whole:]
        if whole:
            self.leader.reached(self.who, END.unpack_from(data, whole - 8)[0])


class Follower(asyncio.Protocol):
    def __init__(self, path):
        self.path = path

    def connection_made(self, transport):
        self.file = File(self.path, lambda end: transport.write(END.pack(end)))

    def data_received(self, data):
        self.file.write(data)


async def main(own, client_ports, copy_ports, directory):
    own, loop = int(own), asyncio.get_running_loop()
    client_ports, copy_ports = (
        [int(port) for port in ports.split(",")] for ports in (client_ports, copy_ports)
    )
    os.makedirs(directory, exist_ok=True)
    numbers = iter(range(9))
    await loop.create_server(
        lambda: Follower(f"{directory}/copy-{next(numbers)}"), "127.0.0.1", copy_ports[own]
    )
    leader = Leader(f"{directory}/log")
    for port in copy_ports[:own] + copy_ports[own + 1 :]:
        while True:
            try:
                transport, _ = await loop.create_connection(
                    lambda: Copy(leader, len(leader.copies) + 1), "127.0.0.1", port
                )
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
            else:
                leader.copies.append(transport)
                break
    server = await loop.create_server(lambda: Client(leader), "127.0.0.1", client_ports[own])
    print("ready", flush=True)
    await server.serve_forever()


uvloop.run(main(*sys.argv[1:]))
