"""Publish orders with confluent-kafka and its Avro serializer: `python examples/registry/publish.py order-1.avsc`.

The file is the schema of the orders. The serializer finds it in the registry, and writes its id before each value.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

TOPIC = "orders"


def main() -> None:
    """Publish orders with the numbers from --first on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("schema", type=Path)
    parser.add_argument("--registry", default=os.environ.get("SCHEMA_REGISTRY_URL", "http://127.0.0.1:8081"))
    parser.add_argument("--servers", default=os.environ.get("MANSIO_BOOTSTRAP_SERVERS", "127.0.0.1:9092"))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    arguments = parser.parse_args()

    registry = SchemaRegistryClient({"url": arguments.registry})
    serialize = AvroSerializer(registry, arguments.schema.read_text(), conf={"auto.register.schemas": False})
    context = SerializationContext(TOPIC, MessageField.VALUE)
    producer = Producer({"bootstrap.servers": arguments.servers})
    for number in range(arguments.first, arguments.first + arguments.count):
        order: dict[str, Any] = {
            "id": number,
            "customer": f"customer-{number % 10}",
            "note": f"note {number}",
        }
        producer.produce(TOPIC, serialize(order, context), key=order["customer"])
    producer.flush()
    print(f"published {arguments.count} orders with {arguments.schema.name}")


if __name__ == "__main__":
    main()
