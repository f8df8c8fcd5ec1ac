"""Every block of docs/QUICKSTART.md does what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.machine import scaled
from support.paths import ROOT, TOOLS

if TYPE_CHECKING:
    from support.process import ServedBroker

PAGE = ROOT / "docs" / "QUICKSTART.md"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = (
    "python3 -m venv",
    "mansio serve",
    "mansio demo",
)  # whoever runs this did the first; tests run the others


def blocks() -> list[tuple[str, str]]:
    return [found for found in BLOCK.findall(PAGE.read_text()) if not found[1].startswith(ELSEWHERE)]


@pytest.mark.full
@pytest.mark.row("A6")
def test_every_block_of_the_quick_start_works_as_pasted(served_broker: ServedBroker):
    environment = {
        **os.environ,
        "MANSIO_BOOTSTRAP_SERVERS": served_broker.bootstrap_servers,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), str(TOOLS), os.environ["PATH"]]),
    }
    printed = []
    for language, block in blocks():
        script = block.replace("127.0.0.1:9092", served_broker.bootstrap_servers)
        script = script.replace("http://127.0.0.1:9080", served_broker.http_url)
        command = ["sh", "-e", "-c", script] if language == "sh" else [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), env=environment)
        assert (done.returncode, done.stderr) == (0, ""), block
        printed.append(done.stdout)
    written = {"ann -> 2 apples", "bob -> 1 pear", "ann -> 3 figs"}
    assert set(printed[0].splitlines()) == written
    assert sorted(printed[1].splitlines()) == ["1 pear", "2 apples", "3 figs"]
    assert "billing" in printed[2]
    assert "b'5 plums'" in printed[3]
    assert set(printed[4].splitlines()) == {*written, "ann -> 5 plums"}
    assert sorted(printed[5].splitlines()) == ["1 pear", "2 apples", "3 figs", "5 plums"]
    assert '"ready":true' in printed[6]
