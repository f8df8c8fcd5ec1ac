"""One target under Atheris, in a process of its own.

`python -m nightly.fuzz.coverage_guided TARGET CORPUS FAILURES SECONDS` runs it.

Coverage guides the mutations. An input that fails, takes longer than `INPUT_S_MAX` or more than `RSS_MIB_MAX` of memory
is written into FAILURES and ends the run with another code than 0.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import atheris

INPUT_S_MAX = 1
RSS_MIB_MAX = 1024
INPUT_BYTES_MAX = 4096


def main() -> None:
    name, corpus, failures, seconds = sys.argv[1:]
    with atheris.instrument_imports(include=["mansio"]):
        from unit.fuzz.targets import TARGETS

    feed, sound = TARGETS[name]
    for number, data in enumerate(sound(Random(20))):
        Path(corpus, f"sound-{number}").write_bytes(data)
    options = {
        "max_total_time": seconds,
        "timeout": INPUT_S_MAX,
        "rss_limit_mb": RSS_MIB_MAX,
        "max_len": INPUT_BYTES_MAX,
        "artifact_prefix": f"{failures}/",
        "print_final_stats": 1,
        "verbosity": 0,
    }
    atheris.Setup([sys.argv[0], corpus, *(f"-{key}={value}" for key, value in options.items())], feed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
