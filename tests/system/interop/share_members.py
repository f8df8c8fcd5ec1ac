"""Members of share groups (confluent-kafka's `ShareConsumer`), each in a process of its own, with commands line by
line.

Run as a module it is such a process; `ShareMember` starts one and talks to it. Always true: whatever a member is told
is answered within a deadline, or the test fails; the process is gone when the test ends, also one that hangs in close.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from support.machine import scaled
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_S = 20.0
TESTS = Path(__file__).parents[2]


class Given(NamedTuple):
    """A record a member was given."""

    partition: int
    offset: int
    value: str
    deliveries: int


class ShareMember:
    """See the module. `explicit`: it states for each record what becomes of it."""

    def __init__(
        self, bootstrap_servers: str, group: str, topic: str, *, explicit: bool = False, **options: Any
    ) -> None:
        config = {
            "bootstrap.servers": bootstrap_servers,
            "group.id": group,
            "share.acknowledgement.mode": "explicit" if explicit else "implicit",
            "log_level": 0,
            **options,
        }
        path = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH", ""), str(TESTS)) if part)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "system.interop.share_members", json.dumps(config), topic],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )

    def ask(self, **command: Any) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(scaled(DEADLINE_S), process.kill)
        watch.start()
        try:
            process.stdin.write(json.dumps(command).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        finally:
            watch.cancel()
        assert line, f"the member did not answer {command} within {DEADLINE_S} s"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def poll(self, count: int = 1, within_s: float = 10.0) -> list[Given]:
        """What comes until there are `count` records, or the time is over; each poll but the last is left as it is."""
        return [Given(*each) for each in self.ask(do="poll", count=count, within_s=within_s)]

    def acknowledge(self, given: list[Given], how: str) -> None:
        """ACCEPT, RELEASE or REJECT."""
        self.ask(do="acknowledge", records=[each[:2] for each in given], how=how)

    def commit(self) -> dict[str, str | None]:
        """Errors by partition."""
        found: dict[str, str | None] = self.ask(do="commit")
        return found

    def commit_well(self) -> None:
        assert set(self.commit().values()) <= {None}

    def close(self) -> None:
        """In order: it leaves the group and ends its session."""
        self.ask(do="close")

    def kill(self) -> None:
        """At once, by SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(scaled(DEADLINE_S))
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def member(bootstrap_servers: str, group: str, topic: str, **options: Any) -> Iterator[ShareMember]:
    """A member that is gone afterwards."""
    one = ShareMember(bootstrap_servers, group, topic, **options)
    try:
        yield one
    finally:
        one.kill()


# ---------------------------------------------------------------- the process


class _Consumer:
    def __init__(self, config: dict[str, Any], topic: str) -> None:
        from confluent_kafka import ShareConsumer

        self._consumer = ShareConsumer(config)
        self._consumer.subscribe([topic])
        self._topic = topic
        self._explicit = config["share.acknowledgement.mode"] == "explicit"

    def poll(self, count: int, within_s: float) -> list[list[Any]]:
        end = time.monotonic() + within_s
        found: list[list[Any]] = []
        while len(found) < count and (left := end - time.monotonic()) > 0:
            for message in self._consumer.poll(min(left, 0.5)):
                if message.error() is not None:
                    raise RuntimeError(str(message.error()))
                value = present(message.value()).decode()
                found.append([message.partition(), message.offset(), value, message.delivery_count()])
            if found and self._explicit:
                break  # what was given has to be answered for first
        return found

    def acknowledge(self, records: list[list[int]], how: str) -> None:
        from confluent_kafka import AcknowledgeType

        for partition, offset in records:
            self._consumer.acknowledge_offset(self._topic, partition, offset, AcknowledgeType[how])

    def commit(self) -> dict[str, str | None]:
        found = self._consumer.commit_sync(10)
        return {
            f"{each.topic}-{each.partition}": None if error is None else str(error)
            for each, error in (found or {}).items()
        }

    def close(self) -> None:
        self._consumer.close()


def main() -> None:
    consumer = _Consumer(json.loads(sys.argv[1]), sys.argv[2])
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"result": getattr(consumer, command.pop("do"))(**command)}
        except Exception as error:  # noqa: BLE001 - the test is told
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
