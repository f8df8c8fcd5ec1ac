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
    return structure.findings(source)


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


def test_folder_with_too_many_modules_is_found(tmp_path: Path) -> None:
    found = findings(
        tmp_path, **{f"module{number}": "" for number in range(structure.FILES_PER_FOLDER_MAX + 1)}
    )
    assert found["folder"] == [f"mansio: {structure.FILES_PER_FOLDER_MAX + 1} modules"]
