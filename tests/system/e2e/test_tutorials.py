"""The tutorials: every block is run as it stands, in order, and prints what the page shows."""

from __future__ import annotations

import re
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from support.documents import Example, examples, lines_to_compare
from support.paths import ROOT, free_port, required_tool
from support.waiting import wait_until
from system.e2e.test_examples import Bench, started

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGES = ("events", "work-queue", "first-pipeline", "first-cluster")
LINES_MAX = 265
BLOCK = re.compile(
    r"^(?P<mark><!-- example: .*\n)?```(?:sh|python)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
CLUSTER_READY_S = 60
STEPS_OF_THE_CLUSTER = [
    "cluster",
    "addresses",
    "create",
    "orders.py",
    "kill",
    "after",
    "start",
    "elect",
    "stop",
]
INSTALLS = "python3 -m venv .venv && . .venv/bin/activate && pip install "


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_tutorial_but_its_installation_is_an_example(page: str) -> None:
    text = (ROOT / f"docs/tutorial/{page}.md").read_text()
    not_run = [block["code"] for block in BLOCK.finditer(text) if not block["mark"]]
    assert len(not_run) == 1, not_run
    assert not_run[0].startswith(INSTALLS), not_run
    assert len(text.splitlines()) <= LINES_MAX


@pytest.mark.full
def test_the_tutorial_about_events_can_be_followed(tmp_path: Path) -> None:
    page = "docs/tutorial/events.md"
    found = examples(page)
    # Which partition is read first is open, and with it what the first three payments are.
    first, rest = found["first-three"].shown, found["rest"].shown
    assert first is not None
    assert rest is not None
    for name in ("first-three", "rest"):
        found[name] = found[name]._replace(shown=None)
    with started(tmp_path, page) as bench:
        printed = bench.follow(found, unordered=["publish"])
    payments, group, table = (
        printed["first-three"][:3],
        printed["first-three"][3:5],
        printed["first-three"][5:8],
    )
    reason = printed["first-three"][8:]
    shown = lines_to_compare(first)
    assert group == shown[3:5]
    assert "it has no member; 2 records wait" in reason[0]
    assert reason[1:] == shown[9:]
    assert sorted(payments + printed["rest"]) == sorted(shown[:3] + lines_to_compare(rest))
    assert sum(int(line.split()[4]) for line in table) == 2


@pytest.mark.full
def test_the_tutorial_about_a_work_queue_can_be_followed(tmp_path: Path) -> None:
    page = "docs/tutorial/work-queue.md"
    with started(tmp_path, page) as bench:
        printed = bench.follow(examples(page))
    assert printed["schedule"].count("next TIME") == 5


@contextmanager
def cluster(directory: Path, example: Example) -> Iterator[Bench]:
    """A bench with three brokers, started by the page's command on ports of this test."""
    required_tool("etcd")
    bench = Bench(directory)
    for name in [name for name in bench.environment if name.startswith("MANSIO_")]:
        del bench.environment[name]  # dev-cluster gives each broker its own
    first, *others = ports = [free_port() for _ in range(3)]
    while others != [first + 1, first + 2]:
        first, *others = ports = [free_port() for _ in range(3)]
    own = [f"127.0.0.1:{port}" for port in ports]
    bench.addresses = {f"127.0.0.1:{9092 + index}": address for index, address in enumerate(own)}
    bench.addresses["--first-port 9092"] = f"--first-port {first}"
    bench.environment["MANSIO_BOOTSTRAP_SERVERS"] = ",".join(own)
    with bench.working(example, ending=signal.SIGINT) as log:
        wait_until(lambda: "dev-cluster ready" in log.read_text(), CLUSTER_READY_S, "the ready line")
        yield bench
    for left in (directory / "cluster/broker-1.log", directory / "cluster/broker-3.log"):
        wait_until(lambda left=left: "broker_stopped" in left.read_text(), 60, f"the end of {left.stem}")


def tables(lines: list[str]) -> dict[str, list[list[str]]]:
    """The tables in an output of commands: their headings -> the words of their rows."""
    found: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in lines:
        if line.isupper():
            rows = found[line] = []
        elif " " in line:
            rows.append(line.split())
    return found


def is_out(printed: list[str], broker: str) -> bool:
    """Whether the broker leads no partition and is in no set of in-sync replicas."""
    partitions, _ = tables(printed).values()
    return all(row[1] != broker and broker not in row[4].split(",") for row in partitions)


@pytest.mark.full
def test_the_tutorial_about_a_cluster_can_be_followed(tmp_path: Path) -> None:
    """Which partition a broker leads, and which one is the controller, differs from run to run."""
    found = examples("docs/tutorial/first-cluster.md")
    assert [*found] == STEPS_OF_THE_CLUSTER
    with cluster(tmp_path, found["cluster"]) as bench:

        def run(name: str) -> list[str]:
            outcome = bench.run(found[name])
            assert outcome.code == 0, f"{name}:\n{outcome.output}"
            printed = bench.printed(outcome.output)
            assert [*tables(printed)] == [*tables(lines_to_compare(found[name].shown or "\n".join(printed)))]
            return printed

        run("addresses")
        partitions, brokers = tables(run("create")).values()
        assert sorted(row[1] for row in partitions) == ["1", "2", "3"]
        assert [[row[1], row[4]] for row in brokers] == [[f"127.0.0.1:{9092 + i}", "ok"] for i in range(3)]
        run("orders.py")
        assert run("kill")[-1].startswith("200 orders acknowledged, the slowest after ")
        wait_until(lambda: is_out(run("after"), "2"), 60, "the others lead, without broker 2")
        after = run("after")
        assert after[-2:] == ["200", "200"]
        assert (
            tables(after)["BROKER ADDRESS RACK CONTROLLER STATE LEADS REPLICAS NOT IN SYNC"][1][4] == "fenced"
        )
        try:
            (partitions,) = tables(run("start")).values()
            assert [(row[-1], len(row[5].split(","))) for row in partitions] == [("ok", 3)] * 3
            elected = tables(run("elect"))
        finally:
            run("stop")
            log = tmp_path / "broker-2.log"
            wait_until(lambda: "broker_stopped" in log.read_text(), 60, "the end of the broker")
        assert sorted(row[1] for row in [*elected.values()][-1]) == ["1", "2", "3"]
