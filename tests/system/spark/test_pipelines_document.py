"""The examples of docs/how-to/pipelines.md, run as they stand and in their order, and those with Spark of the page
about history and of the README.

Commands run in this process, where the session of these tests is found and used: a session for each would cost half a
minute. Only the address of the broker is another one, and the way to the warehouse: Spark's own processes were started
in another directory.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import mansio
from mansio.cli.main import app
from support.machine import scaled
from support.paths import ROOT
from support.process import ServedBroker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

EXAMPLE = re.compile(r"^<!-- example: (\S+) -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BOOTSTRAP = "127.0.0.1:9092"
SECOND = "127.0.0.1:9192"
EXPECTED = {
    "flights": "",
    "rights": "",
    "batch": "",
    "stream": "",
    "available-now": "4 flights",
    "late.py": "",
    "run": "4 records",
    "delays.py": "",
    "run-table": "4 records in 1 batch, into table flights.delays",
    "last.py": "",
    "run-update": "4 records in 1 batch, into table flights.last",
    "several-outputs": "",
    "archive": "4 records",
    "departures": "",
    "backfill": "mansio.late_flights: 2 rows of 2013-01-01T00:00:00Z to 2013-02-01T00:00:00Z",
    "union": "4 flights, archived and live",
    "orders": "",
    "functions": "29.75 in all",
    "archive-decoded": "2 records",
    "sql": "20.25",
    "replay": "THERE ALREADY",
    "look": ",2013,1,",
    "mirror": "0 behind",
    "maintain": "files in the table now",
    "compact": "keys in the table",
    "erase": "mansio.flights ",
    "hot-keys": "N14228",
    "schema-check": "",
    "dead-letters": "",
    "dlq": "REDRIVEN",
    "trace-report": "desk",
    "lag": "mansio.pipeline.archive-flights",
    "release": "HELD",
    "job-function": "4 records, 0 behind",
}

IN_A_SHELL = ("flights", "rights", "orders", "schema-check", "dead-letters")
"""These need no Spark, and a shell."""


def examples(document: str) -> dict[str, tuple[str, str]]:
    found = EXAMPLE.findall((ROOT / document).read_text())
    return {name: (language, code) for name, language, code in found}


@pytest.fixture(scope="module")
def broker_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    """A broker of their own: the examples make topics by the names that people read."""
    broker = ServedBroker(tmp_path_factory.mktemp("document") / "data")
    try:
        yield broker.start()
    finally:
        broker.kill()


@pytest.fixture
def second_broker(tmp_path: Path) -> Iterator[ServedBroker]:
    broker = ServedBroker(tmp_path / "second" / "data", http=False)
    try:
        yield broker.start()
    finally:
        broker.kill()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Commands that run for long take SIGINT and SIGTERM for themselves."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.full
@pytest.mark.usefixtures("handlers")
@pytest.mark.row("S0", "S1", "S3", "S4", "S5", "S6", "S8", "S9", "S10", "S11")
def test_the_examples_of_the_document_work_in_their_order(
    spark: SparkSession,
    broker_process: ServedBroker,
    second_broker: ServedBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MANSIO_BOOTSTRAP_SERVERS", broker_process.bootstrap_servers)
    found = examples("docs/how-to/pipelines.md")
    assert list(found) == list(EXPECTED)
    for name, (language, code) in found.items():
        code = code.replace(BOOTSTRAP, broker_process.bootstrap_servers)
        code = code.replace(SECOND, second_broker.bootstrap_servers)
        code = re.sub(r'(--warehouse |")lake\b', rf"\g<1>{tmp_path}/lake", code)
        # Spark's JVM has another working directory.
        code = code.replace('"checkpointLocation", "', f'"checkpointLocation", "{tmp_path}/')
        code = code.replace('"checkpoints/', f'"{tmp_path}/checkpoints/')
        if name.endswith(".py"):
            (tmp_path / name).write_text(code)
        elif language == "python":
            namespace = execute(code)
            if name == "stream":
                assert namespace["query"] is not None
        elif name in IN_A_SHELL:
            subprocess.run(
                ["sh", "-euc", f'PATH="{Path(sys.executable).parent}:$PATH"\n{code}'],
                check=True,
                timeout=scaled(60),
            )
        else:
            for line in code.splitlines():
                print(command(line))
        shown = capsys.readouterr().out
        assert EXPECTED[name] in shown, f"{name}:\n{shown}"


def execute(code: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__example__"}
    exec(compile(code, "example", "exec"), namespace)
    return namespace


def command(line: str) -> str:
    words = shlex.split(line)
    assert words[0] == "mansio"
    done = CliRunner().invoke(app, words[1:])
    if done.exit_code:
        raise AssertionError(f"{line}: {done.exit_code}: {done.output}") from done.exception
    return str(done.output)


@pytest.mark.full
@pytest.mark.row("S7")
@pytest.mark.usefixtures("spark")
def test_the_examples_about_deliveries_show_the_ones_of_the_record(
    second_broker: ServedBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MANSIO_BOOTSTRAP_SERVERS", second_broker.bootstrap_servers)
    found = examples("docs/how-to/history.md")
    for name in ("python", "deliveries"):
        execute(found[name][1].replace(BOOTSTRAP, second_broker.bootstrap_servers))
    shown = capsys.readouterr().out
    assert re.search(r"some pears\|1 +\|released\|by the member\|\d+ +\|\d+ +\|true", shown), shown
    assert re.search(r"some pears\|2 +\|rejected\|NULL", shown), shown
    report = command(found["trace-report"][1].strip())
    assert "certain: nothing is missing" in report
    assert re.search(r"orders +billing +2 +- +1 ", report), report
    assert (tmp_path / "waits.svg").read_text().startswith("<svg")


@pytest.mark.full
@pytest.mark.usefixtures("spark")
def test_the_example_of_the_readme_shows_a_topic(
    broker_process: ServedBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    language, code = examples("README.md")["spark"]
    assert language == "python"
    topic = "readme-orders"
    with mansio.blocking.connect(broker_process.bootstrap_servers) as client:
        client.admin.create_topic(topic)
        client.publish(topic, b"2 apples")
    code = code.replace('"orders"', f'"{topic}"')
    execute(code.replace(BOOTSTRAP, broker_process.bootstrap_servers))
    assert re.search(r"\|2 apples\| +0\|", capsys.readouterr().out)
