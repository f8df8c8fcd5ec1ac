"""The examples of "Connect with TLS and a password" are run as they stand, against one listener with TLS and users."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.certificates import Authority
from support.documents import examples, lines_to_compare
from support.machine import scaled
from support.secure_front import SecureFront, server_context

PAGE = "docs/how-to/connect-securely.md"
ADDRESS = "broker.example:9093"
USER, PASSWORD = "alice", "correct horse"

pytestmark = pytest.mark.full


def test_examples_of_the_page_work_in_their_order(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    (tmp_path / "ca.pem").write_bytes(authority.certificate.read_bytes())
    (tmp_path / "password.txt").write_text(f"{PASSWORD}\n")
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith(("MANSIO_", "PYTEST"))},
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    printed = {}
    with SecureFront(server_context(authority.issue()), {USER: PASSWORD}) as front:
        for name, example in examples(PAGE).items():
            code = example.code.replace(ADDRESS, front.address)
            command = [sys.executable, "-c", code] if example.language == "python" else ["sh", "-euc", code]
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=scaled(60.0),
                check=False,
            )
            assert done.returncode == 0, f"{name}: {done.stderr}"
            printed[name] = done.stdout
            if example.shown is not None and example.language == "python":
                assert lines_to_compare(done.stdout) == lines_to_compare(example.shown), name
        assert front.authentications
    assert printed["environment"] == "1\n"
    assert "SASL_SSL" in printed["context"]
    assert "greetings" in printed["context"]
    assert "authority is unknown" in printed["doctor"]
