"""Every extra that is missing is one line with the command that installs it; all else works without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mansio.host.extras import DISTRIBUTION_NAMES, EXTRAS
from support.machine import scaled
from support.paths import ROOT
from support.process import inherited
from support.tiers import smoke_first

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKED = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # None: neither found nor imported
sys.argv[1:] = sys.argv[2:]
"""
COMMAND = BLOCKED + "from mansio.cli.main import main\nmain()\n"

MISSING = {
    "cluster": ("grpcio", ["serve", "--etcd", "http://127.0.0.1:1", "--kafka", "127.0.0.1:0"]),
    "spark": ("pyspark", ["pipeline", "archive", "t", "--warehouse", "w", "--once"]),
    "iceberg": ("pyiceberg", ["pipeline", "maintain", "t", "--warehouse", "w"]),
    "mcp": ("mcp", ["mcp"]),
    "jsonschema": ("jsonschema", ["pipeline", "schema-check", "t", "--schema", "s.json"]),
}
"""Extra: a package of it, and a command that needs it."""


def run(program: str, blocked: Sequence[str], arguments: Sequence[str], place: Path) -> tuple[int, str]:
    """Exit code and all output of a program that cannot import some modules."""
    done = subprocess.run(
        [sys.executable, "-c", program, ",".join(blocked), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=place,
        env=inherited(),
        timeout=scaled(60),
        check=False,
    )
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize("extra", smoke_first(*MISSING))
def test_command_without_its_extra_is_one_line_with_the_remedy(extra: str, tmp_path: Path) -> None:
    package, arguments = MISSING[extra]
    modules = {name: module for module, name in DISTRIBUTION_NAMES.items()}
    (tmp_path / "s.json").write_text("{}")
    found = run(COMMAND, [modules.get(package, package)], arguments, tmp_path)
    required = [DISTRIBUTION_NAMES.get(module, module) for module in EXTRAS[extra]]
    assert found[0] == 1
    assert re.fullmatch(rf"mansio: .*\bnot installed: pip install 'mansio-mq\[{extra}\]'", found[1]), found
    assert package in required
    assert package in found[1]


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import mansio.spark; mansio.spark.session()", "spark"),
        ("import mansio.spark; mansio.spark.archive", "spark"),
        ("import mansio.spark; mansio.spark.replay", "iceberg"),
        ("import mansio.metadata.etcd", "cluster"),
        ("import mansio.celery", "celery"),
        ("from mansio.spark.functions import from_avro; from_avro('v', '\"int\"')", "avro"),
        (
            "from mansio.spark.functions import from_protobuf; from_protobuf('v', 'M', None, None, b'x')",
            "protobuf",
        ),
    ],
)
def test_library_without_its_extra_raises_an_error_with_the_remedy(
    code: str, extra: str, tmp_path: Path
) -> None:
    code_, output = run(BLOCKED + code, EXTRAS[extra], [], tmp_path)
    assert code_ == 1
    assert output.splitlines()[-1].startswith("mansio.errors.MissingExtra: ")
    assert output.endswith(f"not installed: pip install 'mansio-mq[{extra}]'")


def test_name_without_its_extra_is_an_import_error_for_programs_that_do_without(tmp_path: Path) -> None:
    code = "try:\n    from mansio.spark import archive\nexcept ImportError as error:\n    print(error)\n"
    code_, output = run(BLOCKED + code, EXTRAS["spark"], [], tmp_path)
    assert code_ == 0
    assert output.endswith("not installed: pip install 'mansio-mq[spark]'")


def test_pipeline_demo_without_its_extra_ends_before_anything_is_started(tmp_path: Path) -> None:
    code = "import mansio_demo.broker_process as b\n"
    code += "def start(*_):\n    raise AssertionError('a broker was started')\n"
    code += "b.BrokerProcess.__init__ = start\nfrom mansio.cli.main import main\nmain()\n"
    code_, output = run(BLOCKED + code, EXTRAS["spark"], ["demo", "pipeline"], tmp_path)
    assert (code_, output.count("\n")) == (1, 0)
    assert output.endswith("not installed: pip install 'mansio-mq[spark]'")
    assert list(tmp_path.iterdir()) == []


def test_missing_java_names_its_extra(tmp_path: Path) -> None:
    code = "import os; os.environ.pop('JAVA_HOME', None); os.environ['PATH'] = ''\n"
    code += "from mansio.spark.session.java import find_java; find_java()"
    _, output = run(BLOCKED + code, EXTRAS["java"], [], tmp_path)
    assert output.endswith("let pip bring it with `pip install 'mansio-mq[java]'`")


def test_broker_client_and_commands_import_without_any_extra(tmp_path: Path) -> None:
    code = "import mansio, mansio.cli.main, mansio.spark, mansio.node.broker, mansio_demo\n"
    code += "print([getattr(mansio, name) for name in mansio.__all__] and 'all there')"
    every = sorted({module for modules in EXTRAS.values() for module in modules})
    assert run(BLOCKED + code, every, [], tmp_path) == (0, "all there")


def test_the_module_is_the_command(tmp_path: Path) -> None:
    outputs = [
        subprocess.check_output([*command, "--version"], cwd=tmp_path, env=inherited(), timeout=scaled(60))
        for command in ([sys.executable, "-m", "mansio"], [str(Path(sys.executable).with_name("mansio"))])
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith(b"mansio ")
    assert os.listdir(tmp_path) == []


def test_extras_of_the_project_bring_what_the_errors_say() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = {
        extra: {re.split(r"[\[<>=!~; ]", one, maxsplit=1)[0] for one in requirements}
        for extra, requirements in declared.items()
    }
    assert declared["all"] == [f"mansio-mq[{','.join(EXTRAS)}]"]
    for extra, modules in EXTRAS.items():
        assert {DISTRIBUTION_NAMES.get(module, module) for module in modules} <= packages[extra]
    assert set(declared) == {*EXTRAS, "all"}
