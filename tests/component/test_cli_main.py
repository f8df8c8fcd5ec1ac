"""Command line: start time, error messages, and agreement with the documentation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools.command_reference import reference

from mansio.cli.main import _app_of, app, main
from mansio.version import __version__
from support.machine import scaled

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "asyncio",
    "rich",
    "pydantic",
    "kio",
    "crc32c",
    "uvicorn",
    "starlette",
    "prometheus_client",
    "mansio.client",
)


ELSEWHERE = {name: value for name, value in os.environ.items() if not name.startswith("MANSIO_")}


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return popen(sys.executable, "-m", "mansio.cli.main", *arguments, **environment)


def popen(*command: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ELSEWHERE, **environment},
    )


def outcome(process: subprocess.Popen[str]) -> tuple[str, str]:
    with process:
        try:
            return process.communicate(timeout=scaled(60))
        finally:
            process.kill()


def mansio(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    process = start(*arguments, **environment)
    out, errors = outcome(process)
    return subprocess.CompletedProcess(arguments, process.returncode, out, errors)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from mansio.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(60))
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_a_command_does_not_import_what_kio_would_like_to_teach() -> None:
    code = (
        "import sys\n"
        "from mansio.cli.main import main\n"
        "try: main(['--version'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "from mansio.wire.codec.messages import preload_schemas\n"
        "next(preload_schemas())\n"
        "print('kio' in sys.modules, [name for name in sys.modules if name.startswith('hypothesis.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(60))
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "True []"


def test_version_is_that_of_the_package_with_the_commit() -> None:
    printed = mansio("--version").stdout.removesuffix("\n")
    if (ROOT / ".git").exists():
        commit = subprocess.check_output(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, text=True
        ).strip()
        assert printed.replace("-dirty", "") == f"mansio {__version__} ({commit})"
    else:
        assert printed.startswith(f"mansio {__version__}")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nonsense"], "nonsense"),
        (["topic", "create"], "missing argument"),
        (["topic", "create", "t", "--partitions", "0"], "--partitions"),
        (["topic", "create", "t", "--partitions", "99999999999"], "--partitions"),
        (["topic", "create", "t", "--replication-factor", "99999"], "--replication-factor"),
        (["topic", "alter", "t", "--partitions", "99999999999"], "--partitions"),
        (["topic", "delete-records", "t", "--before", "9" * 20], "none of"),
        (["produce", "t", "--partition", "99999999999"], "--partition"),
        (["consume", "t", "--partition", "99999999999"], "--partition"),
        (["consume", "t", "--from-time", "9" * 20], "not a time"),
        (["topic", "create", "t", "--config", "retention.ms"], "NAME=VALUE"),
        (["produce", "t", "--key", "k", "--key-separator", ":"], "not both"),
        (["produce", "t", "--acks", "2"], "--acks"),
        (["produce", "t", "--header", "x"], "NAME=VALUE"),
        (["consume", "t", "--from-beginning", "--from-offset", "1"], "only one"),
        (["consume", "t", "--from-time", "yesterday"], "not a time"),
        (["consume", "t", "--to-time", "2999-01-01"], "in the future"),
        (["consume", "t", "--group", "g", "--from-offset", "5"], "reset-offsets"),
        (["consume", "t", "--group", "g", "--partition", "1"], "--partition"),
        (["group", "reset-offsets", "g"], "--to"),
        (["group", "reset-offsets", "g", "--to", "soon"], "@1384992000000"),
        (["topic", "delete-records", "t", "--before", "soon"], "@1384992000000"),
        (["topic", "delete-records", "t", "--before", "+5"], "an offset (42)"),
        (["serve", "--set", "nonsense"], "NAME=VALUE"),
        (["topic", "list", "--bootstrap-servers", "::::"], "'::::'"),
        (["topic", "list", "--bootstrap-servers", ""], "not an address"),
        (["consume", "t", "--bootstrap-servers", "a:b"], "'a:b'"),
        (["produce", "t", "--bootstrap-servers", ":9092"], "':9092'"),
        (["group", "list", "--bootstrap-servers", "127.0.0.1:9092,"], "'127.0.0.1:9092,'"),
    ],
)
def test_an_invalid_command_line_exits_with_2_and_names_the_error(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert complaint in captured.err
    assert captured.out == ""


@pytest.mark.full
def test_without_a_broker_there_is_one_clear_line_and_exit_code_1() -> None:
    commands = (
        ["topic", "list"],
        ["consume", "t", "--exit-at-end"],
        ["produce", "t", "--file", "/dev/null"],
        ["group", "list"],
    )
    for process in [start(*command, MANSIO_BOOTSTRAP_SERVERS="127.0.0.1:1") for command in commands]:
        out, errors = outcome(process)
        assert (process.returncode, out) == (1, "")
        assert errors.startswith("mansio: ")
        assert "127.0.0.1:1" in errors
        assert errors.count("\n") == 1


def test_what_was_closed_by_who_started_us_is_no_traceback() -> None:
    endings = {">&-": "mansio: ", "<&-": "mansio: invalid value for --file: ", "2>&-": ""}
    command = '"$0" -m mansio.cli.main produce t -b 127.0.0.1:1'
    started = {closing: popen("sh", "-c", f"{command} {closing}", sys.executable) for closing in endings}
    for closing, process in started.items():
        out, errors = outcome(process)
        assert process.returncode == (2 if closing == "<&-" else 1)
        assert out == ""
        assert "Traceback" not in errors
        assert "".join(errors.splitlines()[-1:]).startswith(endings[closing])


def test_a_broker_in_the_environment_that_is_no_address_is_a_wrong_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MANSIO_BOOTSTRAP_SERVERS", "a:b")
    with pytest.raises(SystemExit) as end:
        main(["topic", "list"])
    assert end.value.code == 2
    assert "not an address: 'a:b'" in capsys.readouterr().err


def test_output_that_cannot_be_written_is_one_line_and_exit_code_1() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mansio.cli.main", "config", "show"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=scaled(60),
            env={**ELSEWHERE, "PYTHONUNBUFFERED": ""},
        )
    assert (done.returncode, done.stderr) == (1, "mansio: No space left on device\n")


@pytest.mark.parametrize("command", [["serve"], ["config", "show"]])
@pytest.mark.parametrize(
    ("flags", "option", "complaint"),
    [
        (["--set", "lisners=x:1"], "--set", "listeners"),
        (["--set", "node_id=many"], "--set", "node_id"),
        (["--set", "num_partitions=0"], "--set", "num_partitions"),
        (["--kafka", "nonsense"], "--kafka", "host:port"),
    ],
)
def test_a_setting_that_is_wrong_on_the_command_line_is_a_wrong_command_line(
    command: list[str], flags: list[str], option: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, *flags])
    captured = capsys.readouterr()
    assert (end.value.code, captured.out) == (2, "")
    last = captured.err.splitlines()[-1]
    assert last.startswith(f"mansio: invalid value for {option}: ")
    assert complaint in last


def test_a_setting_that_is_wrong_elsewhere_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MANSIO_NODE_ID", "many")
    with pytest.raises(SystemExit) as end:
        main(["config", "show"])
    captured = capsys.readouterr()
    assert (end.value.code, captured.out, captured.err.count("\n")) == (1, "", 1)
    assert captured.err.startswith("mansio: node_id: ")
    assert "environment" in captured.err


def test_config_show_names_the_origin_of_each_value(tmp_path: Path) -> None:
    path = tmp_path / "mansio.yaml"
    path.write_text("num_partitions: 7\nbroker_rack: from-file\n")
    done = mansio(
        "config",
        "show",
        "--config",
        str(path),
        "--kafka",
        "127.0.0.1:9999",
        MANSIO_BROKER_RACK="from-environment",
    )
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert rows["num_partitions"][1::2] == ["7", "file"]
    assert (rows["broker_rack"][1], rows["broker_rack"][-1]) == ("from-environment", "environment")
    assert (rows["listeners"][1], rows["listeners"][-1]) == ("127.0.0.1:9999", "flag")
    assert rows["node_id"][-1] == "default"


def test_a_missing_configuration_file_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--config", "/does/not/exist.yaml"])
    captured = capsys.readouterr()
    assert end.value.code == 1
    assert captured.err.count("\n") == 1
    assert "/does/not/exist.yaml" in captured.err


def test_the_reference_page_is_what_the_commands_say() -> None:
    page = ROOT / "docs/reference/cli.md"
    assert page.read_text() == reference(), "run: python -m tools.command_reference > docs/reference/cli.md"


def test_only_the_command_that_runs_is_built() -> None:
    topic = _app_of(["topic"])
    assert [group.name for group in topic.registered_groups] == ["topic"]
    assert topic.registered_commands == []
    assert [command.name for command in _app_of(["serve"]).registered_commands] == ["serve"]
    for words in ([], ["nonsense"], ["--version"]):
        assert _app_of(words) is app
