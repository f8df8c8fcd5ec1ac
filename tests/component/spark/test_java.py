"""Choice of the Java installation for Spark: the first with a supported version, with missing modules added; an error
if there is none.

Every Java here is a directory with a start script, so the tests need no Java and say the same on every machine.
"""

from __future__ import annotations

import importlib.util
import subprocess
from typing import TYPE_CHECKING

import pytest

from mansio.spark.session import java
from support.machine import scaled

if TYPE_CHECKING:
    from pathlib import Path

ALL_MODULES = "java.base jdk.incubator.vector java.se"
FEW_MODULES = "java.base java.se"


def make_java(home: Path, version: str, modules: str | None = ALL_MODULES) -> Path:
    """A Java that prints its arguments, one a line, and prints its version in `release` unless `modules` is None."""
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / "java"
    version_line = f"echo 'openjdk version \"{version}\"' >&2; exit"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = -version ] && {{ {version_line}; }}\nprintf "%s\\n" "$@"\n', encoding="utf-8"
    )
    program.chmod(0o755)
    if modules is not None:
        (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return home


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any Java."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    (tmp_path / "path").mkdir()
    return tmp_path


def test_java_home_comes_before_path_and_is_used_as_it_is(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_java(world / "own java", "21.0.3")
    (world / "path" / "java").symlink_to(make_java(world / "system", "25.0.1") / "bin" / "java")
    assert java.find_java() == java.JavaHome(str(world / "system"), 25, "PATH")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java.find_java() == java.JavaHome(str(home), 21, "JAVA_HOME")
    assert not (world / "cache").exists()


def test_java_that_is_too_old_is_passed_over(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(world / "old", "1.8.0_402")))
    (world / "path" / "java").symlink_to(
        make_java(world / "system", "17.0.15", modules=None) / "bin" / "java"
    )
    assert java.find_java() == java.JavaHome(str(world / "system"), 17, "PATH")


@pytest.mark.parametrize("home", ["java", "it's java"])
def test_java_without_the_vector_module_is_started_without_that_argument(
    world: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(world / home, "25.0.2", FEW_MODULES)))
    found = java.find_java()
    assert found.version == 25
    assert found.home.startswith(str(world / "cache"))
    given = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "--add-modules=ALL", "", "a b", "$HOME'\""]
    output = subprocess.run(
        [f"{found.home}/bin/java", *given], capture_output=True, text=True, check=True, timeout=scaled(20)
    )
    assert output.stdout.split("\n")[:-1] == [
        one for one in given if one != "--add-modules=jdk.incubator.vector"
    ]
    assert java.find_java() == found, "the second time nothing is made"


def test_cache_that_cannot_be_written_is_done_without(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(world / "java", "25.0.2", FEW_MODULES)))
    (world / "cache").write_text("a file where the directory should be")
    found = java.find_java()
    assert (
        subprocess.run(
            [f"{found.home}/bin/java", "x"], capture_output=True, check=True, timeout=scaled(20)
        ).stdout
        == b"x\n"
    )


def test_no_java_is_one_line_that_names_what_was_found_and_what_to_do(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        java.JavaNotFound, match=r"none in JAVA_HOME or on PATH.*pip install 'mansio-mq\[java\]'"
    ):
        java.find_java()
    monkeypatch.setenv("JAVA_HOME", str(make_java(world / "old", "11.0.2")))
    with pytest.raises(java.JavaNotFound, match=r"JAVA_HOME \(.*old\) is Java 11") as caught:
        java.find_java()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("output", "version"), [("17.0.15", 17), ("1.8.0_402", 8), ("26-ea", 26), ("21", 21), ("what", None)]
)
def test_versions_are_read_in_javas_own_words(output: str, version: int | None) -> None:
    assert java.major_version(output) == version
