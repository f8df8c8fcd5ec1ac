"""Tests that need a new Python interpreter: imported modules, and a limit on memory."""

from __future__ import annotations

import pickle
import subprocess
import sys

from support.machine import scaled
from unit.wire.test_compression import bombs


def test_making_settings_in_a_program_imports_no_pydantic() -> None:
    code = "import sys, mansio.config.settings as c; c.Settings(); assert not {'pydantic', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_wire_imports_no_schema_and_the_statistics_no_application() -> None:
    """All of kio's schemas take over a second; a broker must start in a fifth of that, and without HTTP in less."""
    program = (
        "import sys\n"
        "import mansio.wire.codec.messages, mansio.wire.apis.produce, mansio.wire.apis.fetch, mansio.wire.framing\n"
        "import mansio.api.http.service_stats\n"
        "print([name for name in sys.modules if name.startswith(('kio.schema.', 'starlette', 'uvicorn'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, timeout=scaled(60)
    )
    assert done.stdout.decode().strip() == "[]"


def test_client_that_is_not_traced_imports_nothing_of_opentelemetry() -> None:
    program = (
        "import asyncio, sys, mansio, mansio.blocking, mansio.cli.pipeline\n"
        "async def make():\n"
        "    return mansio.connect('127.0.0.1:1').producer()\n"
        "asyncio.run(make())\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, timeout=scaled(60)
    )
    assert done.stdout.decode().strip() == "[]"


def test_decompression_bombs_are_refused_before_they_take_memory() -> None:
    """In a process of its own that could not hold even one of them."""
    program = (
        "import pickle, resource, sys\n"
        "from mansio.errors import InvalidRecord\n"
        "from mansio.wire.batch.compression import decompress\n"
        "bombs = pickle.load(sys.stdin.buffer)\n"
        "pages = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (pages + (24 << 20),) * 2)\n"
        "for name, (codec, data) in bombs.items():\n"
        "    try:\n"
        "        decompress(codec, data, 1 << 20)\n"
        "    except InvalidRecord:\n"
        "        print(name)\n"
    )
    cases = bombs()
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps({name: (int(codec), data) for name, (codec, data) in cases.items()}),
        capture_output=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split("\n")[:-1] == list(cases)
