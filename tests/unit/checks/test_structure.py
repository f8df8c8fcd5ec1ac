"""Each structural rule of `tools.structure` finds what breaks it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tools import structure

if TYPE_CHECKING:
    from pathlib import Path


def findings(source: Path, **files: str) -> dict[str, list[str]]:
    package = source / "mansio"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    return structure.findings(source, source / "tests")


def test_import_cycle_through_a_type_import_is_found(tmp_path: Path) -> None:
    found = findings(
        tmp_path,
        one="from mansio.two import B\nclass A: ...\n",
        two="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .one import A\nclass B: ...\n",
    )
    assert found["import cycle"] == ["2 modules: mansio.one, mansio.two"]


@pytest.mark.parametrize("body", ["return log._size", "log.size = 1"])
def test_function_that_touches_another_modules_object_is_found(tmp_path: Path, body: str) -> None:
    found = findings(
        tmp_path,
        log="class Log:\n    pass\n",
        roll=f"from mansio.log import Log\ndef roll(log: Log) -> int:\n    {body}\n",
    )
    assert len(found["owner as argument"]) == 1


LOG = """
from collections.abc import Callable
class Log:
    limit: int
    def __init__(self) -> None:
        self.on_full: Callable[[int], None] | None = None
        self.runtime: object
        self.size = 0
"""


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("def attach(log: Log) -> None:\n    log.on_full = print\n", ["callback log.on_full"]),
        ("def attach(log: Log | None) -> None:\n    log.runtime = 1\n", ["part log.runtime"]),
        ("def attach() -> None:\n    log = Log()\n    log.on_full = print\n", ["callback log.on_full"]),
        ("def attach(many) -> None:\n    many[0].on_full = print\n", ["callback many[0].on_full"]),
        (
            "class A:\n    def __init__(self, log: Log) -> None:\n        self.log = log\n"
            "    def attach(self) -> None:\n        self.log.on_full = self.attach\n",
            ["callback self.log.on_full"],
        ),
        ("def attach(log: Log) -> None:\n    log.size = log.limit = 1\n", []),
        ("def attach(other: Other) -> None:\n    other.on_full = print\n", []),
        ("class A:\n    def __init__(self) -> None:\n        self.on_full = print\n", []),
    ],
)
def test_a_callback_that_is_set_after_construction_is_found(
    tmp_path: Path, body: str, found: list[str]
) -> None:
    items = findings(tmp_path, log=LOG, use=f"from mansio.log import Log\n{body}")["late slot"]
    assert [item.partition(" sets the ")[2] for item in items] == found


def test_base_class_with_a_single_subclass_is_found_and_a_protocol_is_not(tmp_path: Path) -> None:
    found = findings(
        tmp_path,
        base="from typing import Protocol\nclass Base: ...\nclass Port(Protocol): ...\nclass Odd(Exception): ...\n",
        one="from mansio.base import Base, Odd, Port\nclass A(Base): ...\nclass B(Port): ...\nclass C(Odd): ...\n",
    )
    found_items = found["single subclass"]
    assert found_items == ["mansio.base.Base: its only subclass is mansio.one.A"]


def test_replaced_word_is_found_with_its_replacement(tmp_path: Path) -> None:
    found = findings(tmp_path, one='"""A door."""\ndef open_door(lane: int) -> None: ...\n')
    assert len(found["vocabulary"]) == 3
    assert all("listener or protocol" in item or "channel" in item for item in found["vocabulary"])


def test_replaced_word_in_a_test_is_found_and_a_term_that_contains_one_is_not(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_one.py").write_text(
        "def test_crowd_is_served(): ...\ndef test_delete_horizon(dead_letters): ...\n"
    )
    assert structure.findings(tmp_path / "src", tests)["vocabulary"] == [
        "test_one.py:1 name 'test_crowd_is_served': not 'crowd' but clients"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "self.failure = error",
        "results.append(error)",
        "return [error] * 3",
        "results = [Result(0, error) for _ in range(3)]",
        "promise.set_exception(error)",
        "complete_with_error(promise, error)",
        "failed = error if final else None",
        "return Result.refused(name, error=error)",
    ],
)
def test_exception_that_is_stored_with_its_traceback_is_found(tmp_path: Path, line: str) -> None:
    text = "def run(self, results, promise):\n    try:\n        work()\n    except ValueError as error:\n        "
    found = findings(tmp_path, one=f"{text}{line}\n")
    assert len(found["stored exception"]) == 1
    assert found["stored exception"][0].startswith("mansio/one.py:5: ")


@pytest.mark.parametrize(
    "line",
    [
        "self.failure = copied(error)",
        "return without_traceback(error)",
        "logger.error('failed', exc_info=error)",
        "raise Refused(error) from error",
        "return str(error)",
    ],
)
def test_exception_without_traceback_may_be_stored(tmp_path: Path, line: str) -> None:
    text = f"def run(self):\n    try:\n        work()\n    except ValueError as error:\n        {line}\n"
    assert not findings(tmp_path, one=text)["stored exception"]


def test_exception_of_a_parameter_that_is_stored_is_found(tmp_path: Path) -> None:
    text = "class Odd(Exception): ...\nclass A:\n    def fail(self, error: Odd | None):\n        self.failure = error\n"
    assert findings(tmp_path, one=text)["stored exception"] == ["mansio/one.py:4: self.failure = error"]


@pytest.mark.parametrize(
    "value", ["error", "self.failure", "results[0]", "self.known.get(1) or self.failure"]
)
def test_raise_of_a_value_that_something_refers_to_is_found(tmp_path: Path, value: str) -> None:
    text = f"def run(self, results):\n    error = ValueError()\n    raise {value}\n"
    assert findings(tmp_path, one=text)["raised value"] == [f"mansio/one.py:3: raise {value}"]


@pytest.mark.parametrize(
    "lines",
    [
        "raise copied(self.failure)",
        "raise _Ended",
        "try:\n        raise error\n    finally:\n        del error",
        "try:\n        work()\n    except ValueError as failed:\n        raise failed from None",
    ],
)
def test_raise_of_a_copy_or_of_a_deleted_name_is_allowed(tmp_path: Path, lines: str) -> None:
    text = f"def run(self, error):\n    {lines}\n"
    assert not findings(tmp_path, one=text)["raised value"]
