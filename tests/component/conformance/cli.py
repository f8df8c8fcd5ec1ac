"""The command line: `mansio produce`, `consume`, `dlq`, each a process."""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar, Final

from component.conformance.protocol import (
    INVALID,
    TOO_LARGE,
    UNKNOWN_ID,
    UNKNOWN_TOPIC,
    WAIT_S,
    WRONG_STATE,
    Protocol,
    Received,
    Refused,
)
from support.forked_serve import run_command

NAMES: Final = {
    "there is no such topic": UNKNOWN_TOPIC,
    "there is no transactional id": UNKNOWN_ID,
    "no open transaction": WRONG_STATE,
    "the transaction is not hanging": WRONG_STATE,
    "exceeds max.message.bytes": TOO_LARGE,
    "invalid value for": INVALID,
}
HOW: Final = {"accept": "--ack", "release": "--release", "reject": "--reject"}


class Cli(Protocol):
    name = "cli"
    cannot: ClassVar = {
        "lease": "`consume` acknowledges, releases or rejects each record that it prints, or holds it until it ends",
    }

    def _run(self, *arguments: str, text: str = "") -> str:
        words = [*arguments, "-b", self.broker.bootstrap_servers]
        done = run_command(words, os.environ, stdin=text.encode(), deadline_s=2 * WAIT_S)
        if done.returncode:
            errors = done.stderr.decode()
            raise Refused(next((name for part, name in NAMES.items() if part in errors), errors))
        return done.stdout.decode()

    def _records(self, *arguments: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._run(*arguments, "-o", "json").splitlines() if line]

    def publish(
        self,
        topic: str,
        value: str,
        *,
        key: str | None = None,
        delay_s: int | None = None,
        priority: str | None = None,
        dedup_id: str | None = None,
    ) -> None:
        arguments = ["produce", topic, "-D", ""]
        if key is not None:
            arguments += ["-k", key]
        if delay_s is not None:
            arguments += ["--delay", f"{delay_s}s"]
        if priority is not None:
            arguments += ["--priority", priority]
        if dedup_id is not None:
            arguments += ["-H", f"mansio-dedup-id={dedup_id}"]
        self._run(*arguments, text=value)

    def take(self, topic: str, count: int, then: str) -> list[Received]:
        group = self.group(topic)
        found = self._records("consume", topic, "--share-group", group, HOW[then], "-n", str(count))
        return [Received(each["value"], each["key"], each["delivery_count"]) for each in found]

    def is_empty(self, topic: str) -> bool:
        return not self._records(
            "consume", topic, "--share-group", self.group(topic), "--release", "--exit-at-end"
        )

    def redrive(self, topic: str) -> int:
        answer = json.loads(
            self._run("dlq", "redrive", topic, "--all", "--group", self.group(topic), "-o", "json")
        )
        return sum(int(row["redriven"]) for row in answer["rows"])

    def read_from(self, topic: str, time_ms: int) -> list[str]:
        found = self._records("consume", topic, "--from-time", str(time_ms), "--exit-at-end")
        return [each["value"] for each in found]

    def transactions(self, pattern: str) -> list[tuple[str, str]]:
        rows = json.loads(self._run("txn", "list", "--pattern", pattern, "-o", "json"))
        return [(row["transactional_id"], row["state"]) for row in rows]

    def transaction(self, transactional_id: str) -> tuple[str, list[str]]:
        found = json.loads(self._run("txn", "describe", transactional_id, "-o", "json"))
        return found["state"], found["partitions"]

    def terminate(self, transactional_id: str) -> None:
        self._run("txn", "terminate", transactional_id, "--yes")

    def hanging(self, topic: str) -> list[int]:
        where = ("-t", topic, "-p", "0", "--open-for", "0s", "-o", "json")
        return [row["start_offset"] for row in json.loads(self._run("txn", "find-hanging", *where))]

    def abort(self, topic: str, start_offset: int) -> None:
        self._run("txn", "abort", "-t", topic, "-p", "0", "--start-offset", str(start_offset), "--yes")

    def close(self) -> None:
        """Each command has ended."""
