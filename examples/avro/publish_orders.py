"""Publish orders in Avro, with a schema of a registry: `python examples/avro/publish_orders.py --count 100000`.

The topic is `sales`. Order N is always the same, so a table of orders can be compared: N from --first on, without gaps.
"""

import argparse
import io
import json
import os
import urllib.request
from typing import Any

import fastavro

import mansio

TOPIC = "sales"
ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": "string"},
        {"name": "cents", "type": "int"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}
FIRST_AT_US = 1_767_225_600_000_000  # 2026-01-01T00:00:00Z, and a second later for every order


def register(registry: str) -> int:
    """Register the schema, and return its id."""
    request = urllib.request.Request(  # noqa: S310  # the address is the user's
        f"{registry}/subjects/{TOPIC}-value/versions",
        json.dumps({"schema": json.dumps(ORDER)}).encode(),
        {"Content-Type": "application/vnd.schemaregistry.v1+json"},
    )
    with urllib.request.urlopen(request) as response:  # noqa: S310
        return int(json.load(response)["id"])


def order(number: int) -> dict[str, Any]:
    """Order `number`."""
    at = FIRST_AT_US + number * 1_000_000
    return {"id": number, "customer": f"customer-{number % 1000}", "cents": number * 7 % 10_007, "at": at}


def encode(schema: Any, schema_id: int, value: dict[str, Any]) -> bytes:
    """A value in Confluent's wire format: byte 0, the id of the schema, and the Avro data."""
    data = io.BytesIO()
    data.write(b"\0" + schema_id.to_bytes(4, "big"))
    fastavro.schemaless_writer(data, schema, value)
    return data.getvalue()


def main() -> None:
    """Publish the orders, 1,000 at a time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--registry", default="http://127.0.0.1:8081")
    parser.add_argument("--servers", default=os.environ.get("MANSIO_BOOTSTRAP_SERVERS", "127.0.0.1:9092"))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100_000)
    arguments = parser.parse_args()
    schema_id, schema = register(arguments.registry), fastavro.parse_schema(ORDER)
    numbers = range(arguments.first, arguments.first + arguments.count)
    with mansio.blocking.connect(arguments.servers) as client:
        for start in range(0, len(numbers), 1000):
            orders = [order(number) for number in numbers[start : start + 1000]]
            records = [
                mansio.OutgoingRecord(encode(schema, schema_id, one), key=one["customer"].encode())
                for one in orders
            ]
            client.publish_many(TOPIC, records)
    print(f"published {arguments.count} orders")


if __name__ == "__main__":
    main()
