"""`python -m bench.sqs`: send, receive and delete in batches of 10, beside moto server and ElasticMQ, in one run.

Each of eight connections repeats: send ten messages of 100 B, receive up to ten, delete them, until all messages are
deleted. Rates are messages that went through the whole cycle, after a warm-up of a quarter as many. Mansio has synced
each message before it answers. ElasticMQ with its message storage on writes them to an H2 database, without a sync;
`elasticmq-memory` and moto keep them in memory. The last column is one boto3 client in one process.

The peers are optional: moto is a package (`pip install 'moto[server]'`), ElasticMQ is fetched by
`tools/peer_servers.sh` and runs with Java. What is missing is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import boto3

from bench.http_load import Connection, encode_request
from bench.servers import Server, free_port

CONNECTIONS = 8
BATCH = 10
BODY = "x" * 100
WARM_UP = 4
"""The warm-up has this part of the messages, so that a JVM has compiled what it runs most."""

ELASTICMQ = Path(__file__).resolve().parent.parent / ".tools" / "elasticmq"
ELASTICMQ_SETTINGS = """
include classpath("application.conf")
generate-node-address = false
node-address {{ protocol = http, host = "127.0.0.1", port = {port}, context-path = "" }}
rest-sqs {{ enabled = true, bind-port = {port}, bind-hostname = "127.0.0.1", sqs-limits = strict }}
rest-stats {{ enabled = false, bind-port = 0, bind-hostname = "127.0.0.1" }}
queues {{}}
queues-storage {{ enabled = false, path = "{data}/queues.conf" }}
messages-storage {{ enabled = {stored}, driver-class = "org.h2.Driver", uri = "jdbc:h2:{data}/messages", username = "",
  password = "", prune-data-on-init = false }}
aws {{ region = us-east-1, accountId = "000000000000" }}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=("mansio", "elasticmq", "elasticmq-memory", "moto"))
    arguments = parser.parse_args()
    names = ["mansio"]
    if shutil.which("java") and ELASTICMQ.is_dir():
        names += ["elasticmq", "elasticmq-memory"]
    if importlib.util.find_spec("moto") and importlib.util.find_spec("flask"):
        names += ["moto"]
    rates: dict[str, list[float]] = {name: [] for name in names if name in (arguments.only or names)}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(arguments.rounds):
            for name in rates:
                rate, boto, cpu_us = measure(name, Path(directory) / f"{name}{number}", arguments.messages)
                rates[name].append(rate)
                print(
                    f"{name}: {rate:,.0f} messages/s, server {cpu_us:.0f} us of processor time each; "
                    f"boto3, one client: {boto:,.0f} messages/s; load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    for name, found in rates.items():
        print(
            f"{name}: median {statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f}) messages/s"
        )


def measure(name: str, data: Path, count: int) -> tuple[float, float, float]:
    """Rate with raw connections, rate with boto3, and processor time of the server per message in us."""
    server = start(name, data)
    try:
        url = f"http://127.0.0.1:{server.port}"
        client = boto3.client(
            "sqs",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
        queue = client.create_queue(QueueName="bench")["QueueUrl"]
        asyncio.run(cycle(server.port, queue, count // WARM_UP))
        before = server.cpu_s()
        rate = asyncio.run(cycle(server.port, queue, count))
        cpu_us = (server.cpu_s() - before) / count * 1e6
        begin = time.perf_counter()
        done = 0
        while done < count // 20:
            entries = [{"Id": str(n), "MessageBody": BODY} for n in range(BATCH)]
            client.send_message_batch(QueueUrl=queue, Entries=entries)
            found = client.receive_message(QueueUrl=queue, MaxNumberOfMessages=BATCH)["Messages"]
            handles = [{"Id": str(n), "ReceiptHandle": each["ReceiptHandle"]} for n, each in enumerate(found)]
            client.delete_message_batch(QueueUrl=queue, Entries=handles)
            done += len(found)
        return rate, done / (time.perf_counter() - begin), cpu_us
    finally:
        server.stop()


def start(name: str, data: Path) -> Server:
    port = free_port()
    if name == "moto":
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        return Server(command, port, data, None, b"Running on")
    if name.startswith("elasticmq"):
        settings = data.with_suffix(".conf")
        stored = "true" if name == "elasticmq" else "false"
        settings.write_text(ELASTICMQ_SETTINGS.format(port=port, data=data, stored=stored))
        command = ["java", f"-Dconfig.file={settings}", "-cp", f"{ELASTICMQ}/*", "org.elasticmq.server.Main"]
        return Server(command, port, data, None, b" started in ")
    command = [sys.executable, "-m", "mansio", "serve", "--data", str(data / "data"), "--http", ""]
    command += ["--kafka", "127.0.0.1:0", "--sqs", f"127.0.0.1:{port}"]
    return Server(command, port, data, None, b" ready kafka=")


async def cycle(port: int, queue: str, count: int) -> float:
    done = 0
    sent = 0

    async def work() -> None:
        nonlocal done, sent
        connection = await Connection("127.0.0.1", port).open()
        entries = [{"Id": str(n), "MessageBody": BODY} for n in range(BATCH)]
        send = request("SendMessageBatch", {"QueueUrl": queue, "Entries": entries})
        receive = request("ReceiveMessage", {"QueueUrl": queue, "MaxNumberOfMessages": BATCH})
        while done < count:
            if sent < count:
                sent += BATCH
                await connection.send(send)
            found = json.loads(await connection.send(receive)).get("Messages", [])
            if found:
                handles = [
                    {"Id": str(n), "ReceiptHandle": each["ReceiptHandle"]} for n, each in enumerate(found)
                ]
                delete = request("DeleteMessageBatch", {"QueueUrl": queue, "Entries": handles})
                deleted = json.loads(await connection.send(delete))
                done += len(deleted["Successful"])
        connection.close()

    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))
    return done / (time.perf_counter() - begin)


def request(action: str, body: object) -> bytes:
    headers = {
        "X-Amz-Target": f"AmazonSQS.{action}",
        "Content-Type": "application/x-amz-json-1.0",
        "Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/sqs/aws4_request, SignedHeaders=host,"
        f" Signature={'0' * 64}",
    }
    return encode_request("POST", "/", headers, json.dumps(body).encode())


if __name__ == "__main__":
    main()
