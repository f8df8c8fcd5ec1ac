"""Output of a child process that its parent relays line by line."""

from __future__ import annotations

import asyncio
import os
import re
import sys

from mansio.host.child_process import READ_BYTES_MAX, TAIL_BYTES_MAX, ChildProcess, RelayedOutput

FAILED = re.compile(b"failed")


def test_lines_arrive_whole_and_the_end_of_the_output_is_kept() -> None:
    async def main() -> None:
        lines: list[bytes] = []
        output = RelayedOutput(lines.append, [FAILED])
        code = """
import sys
sys.stdout.write("be"); sys.stdout.flush()
sys.stdout.write("gin\\n"); sys.stdout.flush()
print("log_failed once")
for number in range(5000): print(number, "x" * 50)
sys.stdout.write("no end of a line")
"""
        child = ChildProcess([sys.executable, "-S", "-c", code], output)
        await child.start()
        assert await child.wait() == 0
        assert child.tail(2) == [f"4999 {'x' * 50}", "no end of a line"]
        assert lines[0] == b"begin\n"
        assert lines[-1] == b"no end of a line"
        assert len(lines) == 5003
        assert len(child.output()) <= TAIL_BYTES_MAX
        assert "begin" not in child.output()
        assert await child.find(FAILED) is not None, "long ago"
        await child.start()
        assert await child.find(FAILED) is None or len(lines) > 5003, "of the last start"
        await child.wait()

    asyncio.run(main())


def test_a_line_without_an_end_comes_in_parts_of_bounded_size() -> None:
    async def main() -> None:
        parts: list[bytes] = []
        output = RelayedOutput(parts.append)
        writer = output.open_writer()
        for _ in range(8):
            os.write(writer, bytes([120]) * (READ_BYTES_MAX // 2))
            await asyncio.sleep(0)
            output.text()
        os.close(writer)
        output.text()
        assert b"".join(parts) == b"x" * (4 * READ_BYTES_MAX)
        assert max(map(len, parts)) <= 3 * READ_BYTES_MAX

    asyncio.run(main())
