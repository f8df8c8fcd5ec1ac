"""Cost of the check of compressed batches at produce: `python -m bench.content_check`. Two brokers on one machine.

Both brokers get the same requests, alternately: Produce with one batch of 100 records of 100 bytes. One broker
runs without the check. Compared is the processor time of the broker's process, because wall time on a busy machine
depends on other processes: per round the ratio of a pair, then median, minimum and maximum of the rounds."""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic

from bench.frames import produce_error, produce_request
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch

ROUNDS = 15
REQUESTS = 1_000
CASES = ((1, 20), (-1, 20), (-1, 1))
"""acks, and requests in flight."""
TOPICS = {"plain": Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}


def serve(arguments: list[str]) -> None:
    """Run a broker in this process; the first argument says whether it checks contents."""
    from mansio.broker.partition import partition
    from mansio.cli.main import main

    if arguments[0] == "unchecked":
        partition.check_content = lambda *_, **__: None  # type: ignore[attr-defined]  # imported there
    main(arguments[1:])


class Broker:
    """A broker in a process of its own."""

    def __init__(self, directory: Path, *, checks: bool) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as free:
            http = free.getsockname()[1]
        arguments = ["serve", "--data", str(directory), "--kafka", f"127.0.0.1:{self.port}"]
        arguments += ["--http", f"127.0.0.1:{http}"]
        command = [
            sys.executable,
            "-m",
            "bench.content_check",
            "--serve",
            "checked" if checks else "unchecked",
        ]
        self.process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert "ready" in self.process.stdout.readline()
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{self.port}"})
        for future in admin.create_topics([NewTopic(name, 1, 1) for name in TOPICS]).values():
            future.result()
        self.socket = socket.create_connection(("127.0.0.1", self.port))

    def processor_s(self) -> float:
        """Processor time of the process so far, of all its threads."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def send(self, frame: bytes, in_flight: int) -> float:
        """Send the frame `REQUESTS` times; return the processor time of a request in microseconds."""
        before = self.processor_s()
        waiting = 0
        for _ in range(REQUESTS):
            self.socket.sendall(frame)
            waiting += 1
            if waiting == in_flight:
                self._receive()
                waiting -= 1
        for _ in range(waiting):
            self._receive()
        return (self.processor_s() - before) / REQUESTS * 1e6

    def ask(self, frame: bytes, topic: str) -> int:
        """Send the frame once; return the error code."""
        self.socket.sendall(frame)
        return produce_error(self._receive(), topic)

    def _receive(self) -> bytes:
        return self._exactly(int.from_bytes(self._exactly(4), "big"))

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self.socket.recv(size - len(found))
            assert part, "the broker closed the connection"
            found += part
        return found

    def close(self) -> None:
        """Stop the process."""
        self.socket.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


def frame_of(topic: str, codec: Codec, acks: int) -> bytes:
    """Return a Produce request whose values are half random, as text and numbers are."""
    noise = random.Random(1)
    now_ms = int(time.time() * 1000)
    values = [noise.randbytes(50) + b"field=value;" * 4 + b"  " for _ in range(100)]
    batch = build_batch([(now_ms, b"key-%d" % n, value, ()) for n, value in enumerate(values)], codec=codec)
    return produce_request(topic, 0, acks, batch)


def main() -> None:
    """Measure, and print one line per codec."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds: int = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        brokers = [
            Broker(Path(directory, "without"), checks=False),
            Broker(Path(directory, "with"), checks=True),
        ]
        try:
            for (acks, in_flight), (topic, codec) in itertools.product(CASES, TOPICS.items()):
                frame = frame_of(topic, codec, acks)
                for each in brokers:
                    assert each.ask(frame, topic) == 0, "the broker refuses the batch"
                pairs = []
                for number in range(rounds + 1):
                    order = brokers if number % 2 else brokers[::-1]
                    times = {each: each.send(frame, in_flight) for each in order}
                    if number:  # the first round warms up
                        pairs.append((times[brokers[0]], times[brokers[1]]))
                ratios = [checked / unchecked for unchecked, checked in pairs]
                without, checked = (statistics.median(side) for side in zip(*pairs, strict=True))
                print(
                    f"{topic}, acks={acks}, {in_flight} in flight: {statistics.median(ratios):.2f}"
                    f" ({min(ratios):.2f} to {max(ratios):.2f}), {without:.0f} and {checked:.0f} us a request,"
                    f" frame of {len(frame)} bytes",
                    flush=True,
                )
        finally:
            for each in brokers:
                each.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    else:
        main()
