"""Spark's own Kafka connector over TLS in a process of its own: `python kafka_connector_secure.py JARS`.

Its directory has `greetings.py`, the program of the page "Connect with TLS and a password", and the settings of Java's
clients with a certificate, `certificate.properties`. Runs the program; then, with its options for each mechanism, and
with the certificate, reads the topic as a batch and copies it as a stream. Prints what it read, by the way to
authenticate, as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nightly.spark.kafka_connector import copy, session

MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN")


def main(jars: str) -> None:
    spark = session(jars)
    known: dict[str, Any] = {}
    exec(compile(Path("greetings.py").read_text(), "greetings.py", "exec"), known)
    options: dict[str, str] = known["options"]
    ways = {mechanism: {**options, "kafka.sasl.mechanism": mechanism} for mechanism in MECHANISMS}
    login = options["kafka.sasl.jaas.config"]
    ways["PLAIN"]["kafka.sasl.jaas.config"] = login.replace("scram.ScramLogin", "plain.PlainLogin")
    lines = Path("certificate.properties").read_text().splitlines()
    ways["certificate"] = {f"kafka.{name}": value for name, value in (line.split("=", 1) for line in lines)}
    found = {}
    for number, (way, chosen) in enumerate(ways.items()):
        batch = spark.read.format("kafka").options(**chosen, subscribe="greetings").load()
        values = [row[0] for row in batch.selectExpr("CAST(value AS STRING)").collect()]
        copied = copy(spark, chosen, "greetings", f"copy-{number}", f"checkpoint-{number}")
        written = spark.read.format("kafka").options(**chosen, subscribe=f"copy-{number}").load().count()
        found[way] = [values, copied, written]
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
