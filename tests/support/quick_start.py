"""Every block of docs/tutorial/quickstart.md, run as pasted, with its output checked."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

from support.machine import scaled
from support.paths import ROOT, TOOLS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from support.process import ServedBroker

PAGE = ROOT / "docs/tutorial/quickstart.md"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = ("python3 -m venv", "mansio serve", "mansio demo")
"""Beginnings of blocks that the caller has done, or that other tests run."""


def check_quick_start(
    broker: ServedBroker,
    python: Path,
    *,
    variables: Mapping[str, str] | None = None,
    place: Path | None = None,
) -> None:
    """Run the blocks with the commands beside `python`."""
    environment = {**os.environ, **(variables or {}), "MANSIO_BOOTSTRAP_SERVERS": broker.bootstrap_servers}
    environment["PATH"] = os.pathsep.join([str(python.parent), str(TOOLS), os.environ["PATH"]])
    printed = []
    for language, block in BLOCK.findall(PAGE.read_text()):
        if block.startswith(NOT_RUN):
            continue
        script = block.replace("127.0.0.1:9092", broker.bootstrap_servers)
        script = script.replace("http://127.0.0.1:9080", broker.http_url)
        command = ["sh", "-e", "-c", script] if language == "sh" else [str(python), "-c", script]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=scaled(60),
            env=environment,
            cwd=place,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), block
        printed.append(done.stdout)
    written = {"ann -> 2 apples", "bob -> 1 pear", "ann -> 3 figs"}
    assert set(printed[0].splitlines()) == written
    assert sorted(printed[1].splitlines()) == ["1 pear", "2 apples", "3 figs"]
    assert "billing" in printed[2]
    assert "b'5 plums'" in printed[3]
    assert set(printed[4].splitlines()) == {*written, "ann -> 5 plums"}
    assert sorted(printed[5].splitlines()) == ["1 pear", "2 apples", "3 figs", "5 plums"]
    # A loaded machine can keep the event loop waiting for longer than a probe allows.
    assert '"ready":true' in printed[6] or "event_loop_stalled" in printed[6], printed[6]
