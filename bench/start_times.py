"""Processor time of `import mansio` and `mansio --help`, compared with an earlier commit.

    python -m bench.start_times [COMMIT] [--rounds N]

COMMIT is the one before the last by default. Both trees run with this interpreter and its packages, in turn, after one
run each that compiles them. Printed are medians of user and system time in milliseconds; what the interpreter itself
takes is included, and printed. The exit code is 1 where a limit is exceeded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
CASES: Final = {
    "python -c pass": ["-c", "pass"],
    "import mansio": ["-c", "import mansio"],
    "mansio --help": ["-m", "mansio.cli.main", "--help"],
}
LIMITS_MS: Final = {"import mansio": 150.0, "mansio --help": 400.0}


def processor_ms(source: Path, arguments: list[str]) -> float:
    """User and system time of one interpreter with the sources in `source`, in milliseconds."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with open(os.devnull, "wb") as nowhere:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=nowhere,
            cwd=source,
            env={**inherited, "PYTHONPATH": str(source)},
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{arguments} in {source} ended with {process.returncode}")
    return (usage.ru_utime + usage.ru_stime) * 1000


def unpack(commit: str, directory: Path) -> Path:
    """The sources of a commit, in a directory."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", commit, "src"], cwd=ROOT, capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", directory], input=archive.stdout, check=True)
    return directory / "src"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("commit", nargs="?", default="HEAD~1", help="what to compare with")
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mansio-start-") as directory:
        trees = {chosen.commit: unpack(chosen.commit, Path(directory)), "this tree": ROOT / "src"}
        times: dict[tuple[str, str], list[float]] = {}
        for number in range(chosen.rounds + 1):
            for case, arguments in CASES.items():
                for tree, source in trees.items():
                    took = processor_ms(source, arguments)
                    if number:  # the first round compiles
                        times.setdefault((case, tree), []).append(took)
    print(f"{'':16}{chosen.commit:>14}{'this tree':>14}{'change':>10}{'limit':>10}   processor time, ms")
    above = []
    for case in CASES:
        before, now = (statistics.median(times[case, tree]) for tree in trees)
        limit = f"{LIMITS_MS[case]:.0f}" if case in LIMITS_MS else "-"
        print(f"{case:16}{before:14.0f}{now:14.0f}{now - before:+10.0f}{limit:>10}")
        if now > LIMITS_MS.get(case, now):
            above.append(case)
    if above:
        sys.exit(f"above the limit: {', '.join(above)}")


if __name__ == "__main__":
    main()
