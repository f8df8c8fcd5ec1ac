"""Cost of making many partitions durable: fdatasync per file, one syncfs, or one shared journal.

    python bench/sync_modes.py [--directory DIR] [--rounds N]

For each number of dirty files, every round appends one batch to each file and makes all of them durable with each of
the three methods in turn. Printed are the median and the 90th percentile of the time in milliseconds. `neighbour`
repeats the syncfs column while another process dirties the same file system. docs/adr/0003-syncing-many-partitions.md
has the decision.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

from mansio.host.disk import HostDisk, HostFile

BATCH = os.urandom(1024)
FILE_COUNTS = (1, 2, 4, 8, 16, 64, 256)
NEIGHBOUR = (
    "import os,sys\n"
    "f=os.open(sys.argv[1],os.O_RDWR|os.O_CREAT)\n"
    "b=bytes(1<<20)\n"
    "while True:\n"
    "    for i in range(64): os.pwrite(f,b,i<<20)\n"
)


def dirty(files: list[HostFile], position: int) -> None:
    for file in files:
        file.write_at([BATCH], position)


def measure(directory: str, count: int, mode: str, rounds: int) -> list[float]:
    """Seconds per round."""
    disk = HostDisk()
    files = [disk.open(f"{directory}/{mode}-{count}-{number}", create=True) for number in range(count)]
    journal = disk.open(f"{directory}/{mode}-{count}-journal", create=True)
    disk.sync_directory(directory)
    disk.sync_all(directory)
    times = []
    for number in range(rounds):
        position = number * len(BATCH)
        dirty(files, position)
        begin = time.perf_counter()
        if mode == "file":
            for file in files:
                file.sync()
        elif mode == "syncfs":
            disk.sync_all(directory)
        else:
            journal.write_at([BATCH] * count, position * count)
            journal.sync()
        times.append(time.perf_counter() - begin)
    disk.sync_all(directory)
    disk.close()
    return times


def show(times: list[float]) -> str:
    ordered = sorted(times)
    return f"{statistics.median(ordered) * 1000:8.2f} {ordered[int(len(ordered) * 0.9)] * 1000:8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory", default=None, help="where to write; a new directory is made in it and removed"
    )
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        print("dirty files |  fdatasync each |     one syncfs    |   one journal    (median, p90, ms)")
        for count in FILE_COUNTS:
            rounds = max(5, arguments.rounds if count < 64 else arguments.rounds // 3)
            columns = [
                show(measure(directory, count, mode, rounds)) for mode in ("file", "syncfs", "journal")
            ]
            print(f"{count:11d} | " + " | ".join(columns), flush=True)
        neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, f"{directory}/neighbour"])
        try:
            time.sleep(0.5)
            for count in (1, 16, 64):
                columns = [show(measure(f"{directory}", count, mode, 8)) for mode in ("file", "syncfs")]
                print(f"{count:11d} | " + " | ".join(columns) + " |  with a neighbour writing", flush=True)
        finally:
            neighbour.kill()
            neighbour.wait()


if __name__ == "__main__":
    main()
