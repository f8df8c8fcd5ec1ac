"""`python -m bench.sqs`: send, receive and delete in batches of 10, beside moto server and ElasticMQ, in one run.

Each of eight connections repeats: send ten messages of 100 B, receive up to ten, delete them, until all messages are
deleted. Rates are messages that went through the whole cycle, after a warm-up of a quarter as many. Mansio has synced
each message before it answers. ElasticMQ with its message storage on writes them to an H2 database, without a sync;
`elasticmq-memory` and moto keep them in memory. The last column is one boto3 client in one process.

`mansio-signed` checks signatures (Signature Version 4) of an access key that belongs to a user; the load signs each of
its requests. Compare the processor time of the server, which does not contain the load.

The peers are optional: moto is a package (`pip install 'moto[server]'`), ElasticMQ is fetched by
`tools/peer_servers.sh` and runs with Java. What is missing is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.util
import json
import os
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import boto3

import mansio.blocking
from bench.http_load import Connection, encode_request
from bench.servers import Server, free_port
from mansio.api.sqs.signature import SignedRequest, sign
from mansio.host.private_file import write_private_file


class Key(NamedTuple):
    """An access key."""

    key_id: str
    secret: str


UNSIGNED = Key("a", "b")
SIGNED = "mansio-signed"
REGION = "us-east-1"
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
    parser.add_argument(
        "--only", nargs="+", choices=("mansio", "mansio-signed", "elasticmq", "elasticmq-memory", "moto")
    )
    arguments = parser.parse_args()
    names = ["mansio", "mansio-signed"]
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
    server, kafka_port = start(name, data)
    try:
        key = create_access_key(kafka_port) if name == SIGNED else UNSIGNED
        url = f"http://127.0.0.1:{server.port}"
        client = boto3.client(
            "sqs",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id=key.key_id,
            aws_secret_access_key=key.secret,
        )
        queue = client.create_queue(QueueName="bench")["QueueUrl"]
        asyncio.run(cycle(server.port, queue, count // WARM_UP, key))
        before = server.cpu_s()
        rate = asyncio.run(cycle(server.port, queue, count, key))
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


def start(name: str, data: Path) -> tuple[Server, int]:
    """Start a server; it and, of Mansio, the port of its Kafka listener."""
    port, kafka_port = free_port(), free_port()
    if name == "moto":
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        return Server(command, port, data, None, b"Running on"), 0
    if name.startswith("elasticmq"):
        settings = data.with_suffix(".conf")
        stored = "true" if name == "elasticmq" else "false"
        settings.write_text(ELASTICMQ_SETTINGS.format(port=port, data=data, stored=stored))
        command = ["java", f"-Dconfig.file={settings}", "-cp", f"{ELASTICMQ}/*", "org.elasticmq.server.Main"]
        return Server(command, port, data, None, b" started in "), 0
    command = [sys.executable, "-m", "mansio", "serve", "--data", str(data / "data"), "--http", ""]
    command += ["--kafka", f"127.0.0.1:{kafka_port}", "--sqs", f"127.0.0.1:{port}"]
    if name == SIGNED:
        keys = data.with_suffix(".key")
        write_private_file(str(keys), f"{secrets.token_hex(32)}\n".encode())
        command += ["--set", f"secrets_key_file={keys}", "--set", "open_listeners=PLAINTEXT"]
    return Server(command, port, data, None, b" ready kafka="), kafka_port


def create_access_key(kafka_port: int) -> Key:
    with mansio.blocking.connect(f"127.0.0.1:{kafka_port}") as client:
        client.admin.users.create("bench", secrets.token_hex(16))
        created = client.admin.users.create_sqs_key("bench")
    return Key(created.key_id, created.secret or "")


async def cycle(port: int, queue: str, count: int, key: Key) -> float:
    done = 0
    sent = 0

    async def work() -> None:
        nonlocal done, sent
        connection = await Connection("127.0.0.1", port).open()
        entries = [{"Id": str(n), "MessageBody": BODY} for n in range(BATCH)]
        send = partial(request, "SendMessageBatch", {"QueueUrl": queue, "Entries": entries}, key)
        receive = partial(request, "ReceiveMessage", {"QueueUrl": queue, "MaxNumberOfMessages": BATCH}, key)
        if key is UNSIGNED:  # the same bytes each time
            send, receive = partial(bytes, send()), partial(bytes, receive())
        while done < count:
            if sent < count:
                sent += BATCH
                await connection.send(send())
            found = json.loads(await connection.send(receive())).get("Messages", [])
            if found:
                handles = [
                    {"Id": str(n), "ReceiptHandle": each["ReceiptHandle"]} for n, each in enumerate(found)
                ]
                delete = request("DeleteMessageBatch", {"QueueUrl": queue, "Entries": handles}, key)
                deleted = json.loads(await connection.send(delete))
                done += len(deleted["Successful"])
        connection.close()

    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))
    return done / (time.perf_counter() - begin)


def request(action: str, body: object, key: Key) -> bytes:
    headers = {"X-Amz-Target": f"AmazonSQS.{action}", "Content-Type": "application/x-amz-json-1.0"}
    data = json.dumps(body).encode()
    sent, signature, signed = "20260101T000000Z", "0" * 64, ["host"]
    if key is not UNSIGNED:
        headers["X-Amz-Date"] = sent = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        names = {"host": "localhost", **{name.lower(): value for name, value in headers.items()}}
        signed = sorted(names)
        digest = hashlib.sha256(data).hexdigest()
        signature = sign(SignedRequest("POST", "/", "", names, digest), key.secret, REGION, signed, sent)
    headers["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={key.key_id}/{sent[:8]}/{REGION}/sqs/aws4_request, "
        f"SignedHeaders={';'.join(signed)}, Signature={signature}"
    )
    return encode_request("POST", "/", headers, data)


if __name__ == "__main__":
    main()
