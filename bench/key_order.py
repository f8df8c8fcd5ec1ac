"""`python -m bench.key_order`: delivery of one partition by a share group in order by key, and by one with a limit by
key, beside one without both. The limit is never reached.

    turn       keys in turn: adjacent records have different keys, and those of a key are far apart
    random     keys at random: an answer has few adjacent offsets

One member without a client library takes the records in batches and accepts each batch with its next request. Rounds
alternate, each with new groups of the same topic; the ratio is the median of the rounds, with the lowest and highest.
Keys are read from the log once for each group, so each round contains that.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.servers import Server, create_topic, start_mansio
from bench.share_frames import ShareFetches, acquired
from mansio import OutgoingRecord
from mansio.client import blocking

if TYPE_CHECKING:
    import io
    from collections.abc import Iterable

VALUE = bytes(100)
SEED = 7
ORDERS = ("none", "key", "limit")
LEASES_MAX = 1_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=200_000, help="records of each topic")
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=500, help="records leased at a time")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    chance = random.Random(SEED)
    kinds: dict[str, Iterable[int]] = {
        "turn": [number % arguments.keys for number in range(arguments.records)],
        "random": [chance.randrange(arguments.keys) for _ in range(arguments.records)],
    }
    with tempfile.TemporaryDirectory() as directory:
        server = start_mansio(Path(directory) / "data", None)
        for kind, keys in kinds.items():
            publish(server, kind, keys)
            measure(server, kind, arguments)
        server.stop()


def publish(server: Server, topic: str, keys: Iterable[int]) -> None:
    create_topic(server, topic, 1)
    with blocking.connect(f"127.0.0.1:{server.port}") as client:
        client.publish_many(topic, [OutgoingRecord(VALUE, key=b"key-%d" % key) for key in keys])


def measure(server: Server, topic: str, arguments: argparse.Namespace) -> None:
    rates: dict[str, list[float]] = {order: [] for order in ORDERS}
    for number in range(arguments.rounds):
        for order in ORDERS if number % 2 else tuple(reversed(ORDERS)):
            group = f"{topic}-{order}-{number}"
            rates[order].append(delivered(server, topic, group, order, arguments))
    for order in ORDERS[1:]:
        ratios = [by_key / without for by_key, without in zip(rates[order], rates["none"], strict=True)]
        print(
            f"{topic}, {order}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of the rate"
            f" without; {statistics.median(rates[order]):,.0f} and {statistics.median(rates['none']):,.0f} records a"
            f" second, load {os.getloadavg()[0]:.1f}"
        )


def delivered(server: Server, topic: str, group: str, order: str, arguments: argparse.Namespace) -> float:
    """Take and accept all records; return the number per second."""
    with blocking.connect(f"127.0.0.1:{server.port}") as client:
        settings = {"share.auto.offset.reset": "earliest"}
        settings |= {
            "none": {},
            "key": {"mansio.share.order": "key"},
            "limit": {"mansio.share.key.leases.max": f"{LEASES_MAX}"},
        }[order]
        client.admin.alter_group_config(group, settings)
        topic_id = bytes(client.admin.describe_topic(topic).topic_id)
    fetches, done = ShareFetches(group, "member", topic_id), 0
    leased: list[tuple[int, int]] = []
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        reader = connection.makefile("rb")
        began = time.perf_counter()
        while done < arguments.records or leased:
            more = arguments.batch if done < arguments.records else 0
            connection.sendall(fetches.request(more, leased))
            leased = acquired(answer(reader))
            done += sum(last - first + 1 for first, last in leased)
        return done / (time.perf_counter() - began)


def answer(reader: io.BufferedReader) -> memoryview:
    """The next framed response."""
    start = reader.read(4)
    return memoryview(start + reader.read(int.from_bytes(start, "big")))


if __name__ == "__main__":
    main()
