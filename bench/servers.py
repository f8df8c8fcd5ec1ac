"""Server processes under test: started, pinned to a processor, awaited until idle, stopped by process id.

Invariant: all servers run on the same processor with data under the same directory; a server's data is removed when it
stops, so that its pages are not written back during the next run.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from mansio.client import blocking

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 20.0
IDLE_DEADLINE_S = 15.0
IDLE_CPU_S = 0.02
"""A server that used less processor time than this in the last `IDLE_WINDOW_S` has finished its warm-up."""
IDLE_WINDOW_S = 0.3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running server on 127.0.0.1:`port`."""

    def __init__(
        self, command: list[str], port: int, data: Path, processor: int | None, ready: bytes
    ) -> None:
        self.port = port
        self.data = data
        data.mkdir(parents=True, exist_ok=True)
        self.output = data.with_suffix(".log")
        begin = time.monotonic()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if processor is not None:
            os.sched_setaffinity(self.process.pid, {processor})
        self._wait_for(ready)
        self.ready_s = time.monotonic() - begin
        """Seconds from start to its `ready` line, including imports."""

    def _wait_for(self, ready: bytes) -> None:
        end = time.monotonic() + START_DEADLINE_S
        while ready not in self.output.read_bytes():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError(f"the server did not start:\n{self.text}")
            time.sleep(0.01)

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def cpu_s(self) -> float:
        """Processor time of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def cpu_precise_s(self) -> float:
        """As `cpu_s`, with microsecond resolution if the kernel supports it; without ended threads."""
        times = [
            path.read_text().split()[0] for path in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        ]
        return sum(map(int, times)) / 1e9 if times else self.cpu_s()

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def wait_idle(self) -> None:
        """Wait until it is idle (a broker continues importing after it is ready)."""
        end = time.monotonic() + IDLE_DEADLINE_S
        used = self.cpu_s()
        while time.monotonic() < end:
            time.sleep(IDLE_WINDOW_S)
            before, used = used, self.cpu_s()
            if used - before < IDLE_CPU_S:
                return

    def end(self, number: int = signal.SIGTERM) -> None:
        """Stop it with a signal; its data stays."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def stop(self) -> None:
        self.end()
        shutil.rmtree(self.data, ignore_errors=True)


def start_baseline(data: Path, processor: int | None, *, sync: bool) -> Server:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "bench.baseline_server",
        str(port),
        str(data / "log"),
        *(["sync"] if sync else []),
    ]
    server = Server(command, port, data, processor, b"")
    end = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if server.process.poll() is not None or time.monotonic() > end:
                server.stop()
                raise RuntimeError(f"the baseline did not start:\n{server.text}") from None
            time.sleep(0.01)
        else:
            return server


def start_mansio(data: Path, processor: int | None) -> Server:
    """A broker on `data`, which may have data of a previous broker."""
    port = free_port()
    serve = ["serve", "--data", str(data), "--kafka", f"127.0.0.1:{port}", "--http", ""]
    command = [sys.executable, "-m", "mansio.cli.main", *serve]
    server = Server(command, port, data, processor, b"ready")
    server.wait_idle()
    return server


def create_topic(server: Server, name: str, partitions: int) -> None:
    with blocking.connect(f"127.0.0.1:{server.port}") as client:
        client.admin.create_topic(name, partitions=partitions)


def delete_topic(server: Server, name: str) -> None:
    with blocking.connect(f"127.0.0.1:{server.port}") as client:
        client.admin.delete_topic(name)


EMBEDDED = """
import sys, time, mansio
Broker = mansio.Broker
begin = time.perf_counter()
with Broker(sys.argv[1]):
    print((time.perf_counter() - begin) * 1000)
"""


def embedded_start_ms(data: Path) -> float:
    """Milliseconds from `mansio.Broker(...)` to a responding broker, in a new process, without imports."""
    command = [sys.executable, "-c", EMBEDDED, str(data)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        shutil.rmtree(data, ignore_errors=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    return float(done.stdout)
