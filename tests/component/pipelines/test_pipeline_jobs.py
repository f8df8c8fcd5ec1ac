"""`mansio pipeline`: a job is imported only when it is run, and no help text imports Spark."""

from __future__ import annotations

import importlib
import json
import pkgutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import typer

from mansio.cli import pipeline
from mansio.cli.pipeline.run import absolute_location
from support.machine import scaled

if TYPE_CHECKING:
    from pathlib import Path

PROBE = """
import json, sys
from mansio.cli import main
try:
    main.main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""


def loaded_by(*words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words], capture_output=True, text=True, timeout=scaled(60), check=True
    )
    code, modules = json.loads(done.stderr)
    assert code == 0, done.stdout
    return list(modules)


def test_help_of_mansio_loads_no_job() -> None:
    assert [name for name in loaded_by("--help") if name.startswith("mansio.cli.pipeline.")] == []


def test_help_of_the_jobs_loads_them_all_and_nothing_heavy() -> None:
    modules = loaded_by("pipeline", "--help")
    assert "mansio.cli.pipeline.run" in modules
    heavy = {"pyspark", "pyarrow", "numpy", "pyiceberg", "pandas", "mansio.client", "mansio.broker"}
    assert heavy.isdisjoint(modules)


def test_every_module_of_a_job_adds_its_command() -> None:
    group = typer.main.get_group(pipeline.app)
    names = {name.replace("-", "_") for name in group.commands}
    assert names == {one.name for one in pkgutil.iter_modules(pipeline.__path__)}


@pytest.mark.parametrize("words", [["run", "x.py"], ["run", "x.py", "--to", "a", "--to-table", "b"]])
def test_run_wants_one_place_for_its_result(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from mansio.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(["pipeline", *words])
    assert end.value.code == 2
    assert "--to / --to-table / --to-path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--to", "a", "--key", "id"], "--warehouse / --partition-by / --sort-by / --rename-column / --key"),
        (["--to-table", "t", "--mode", "update"], "give both --mode update and --key"),
        (["--to-table", "t", "--key", "id"], "give both --mode update and --key"),
        (["--to-path", "d", "--mode", "update"], "files cannot be updated"),
        (["--to-path", "d", "--at-least-once"], "it belongs to --to"),
        (["--to-table", "t", "--order-by", "ts"], "they belong to --key"),
        (["--to", "a", "--on-null-key", "skip"], "they belong to --key"),
    ],
)
def test_options_of_a_table_are_refused_where_they_would_do_nothing(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from mansio.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(["pipeline", "run", "x.py", *words])
    assert end.value.code == 2
    assert reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--partition-by", "week(ts)"], "'week(ts)' names no partition transform"),
        (["--sort-by", "a b c"], "'a b c' is no sort field"),
        ([], "the table is in no configured catalog: give --warehouse DIR"),
    ],
)
def test_layout_that_cannot_be_parsed_is_refused_before_spark_starts(
    tmp_path: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from mansio.cli.main import main

    file = tmp_path / "same.py"
    file.write_text("def transform(frame):\n    return frame\n")
    with pytest.raises(SystemExit) as end:
        main(["pipeline", "run", str(file), "--to-table", "t", *words])
    assert end.value.code == 1
    assert reason in capsys.readouterr().err


def test_what_is_wrong_with_the_file_is_reported_before_spark_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from mansio.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(["pipeline", "run", "no-such-file.py", "--to", "a"])
    assert end.value.code == 1
    assert capsys.readouterr().err == "mansio: there is no file no-such-file.py\n"


def test_a_directory_for_tables_is_the_same_from_wherever_the_command_is_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_location("tables") == str(tmp_path / "tables")
    assert absolute_location("s3://bucket/tables") == "s3://bucket/tables"


def test_missing_broker_is_reported_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mansio.cli.main import main

    def started(*_arguments: object, **_settings: object) -> None:
        pytest.fail("a session was started")

    monkeypatch.setattr(importlib.import_module("mansio.spark.session"), "session", started)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    file = tmp_path / "same.py"
    file.write_text("def transform(frame):\n    return frame\n")
    with pytest.raises(SystemExit) as end:
        main(["pipeline", "run", str(file), "--topic", "t", "--to", "o", "--bootstrap-servers", address])
    assert end.value.code == 1
    assert f"cannot connect to {address}" in capsys.readouterr().err
