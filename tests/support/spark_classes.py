"""Archive of Spark's classes for the JVMs of tests (Java's class data sharing): `python -m support.spark_classes`.

A JVM with Spark reads, checks and links ten thousand classes, which is half of the processor time of its start. The
Spark tests start dozens: drivers, executors, masters, workers. The archive belongs to the PySpark of this environment
and to one Java. `make setup` writes it; without it the tests take longer.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mansio.spark.session.java import JavaNotFound, find_java

QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
"""A JVM that cannot use the archive runs without it, and is not to say so among the lines of a command."""
PREFIX = ".spark-classes-"
DEADLINE_S = 600.0
TRAINING = """
import os
import sys

import pyarrow as pa
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from mansio.spark import session, start_available_now

place = sys.argv[1]
spark = session("local[2]", "training")


class Numbers(DataSource):
    def schema(self):
        return "key binary, value binary, partition int, offset bigint"

    def reader(self, schema):
        return NumbersReader()


class NumbersReader(DataSourceReader):
    def partitions(self):
        return [InputPartition(0), InputPartition(1)]

    def read(self, partition):
        for number in range(10):
            yield b"key", b"%d" % number, partition.value, number


def same(batches):
    yield from batches


def take(frame, batch):
    frame.mapInArrow(same, frame.schema).collect()
    frame.write.mode("overwrite").parquet(place + "/rows")


spark.dataSource.register(Numbers)
rows = spark.read.format("Numbers").load()
rows.selectExpr("cast(value as string) value", "offset").sort("offset").collect()
text = f.udf(lambda value: bytes(value).decode(), "string")
rows.select(text("value").alias("text")).groupBy("text").count().collect()
rows.select(f.to_json(f.struct("partition", "offset")).alias("json")).collect()
rows.write.parquet(place + "/input")
stream = spark.readStream.schema(rows.schema).parquet(place + "/input")
for name, frame, mode in (("plain", stream, "append"), ("state", stream.groupBy("partition").count(), "update")):
    writer = frame.writeStream.foreachBatch(take).outputMode(mode)
    start_available_now(writer.option("checkpointLocation", place + "/" + name)).awaitTermination()
files = stream.writeStream.format("parquet").option("path", place + "/out")
start_available_now(files.option("checkpointLocation", place + "/files")).awaitTermination()
gateway = spark.sparkContext._gateway
spark.stop()
gateway.shutdown()
gateway.proc.stdin.close()
gateway.proc.wait()  # it writes the archive when it ends
"""


def archive_path() -> Path | None:
    """Where the archive of this PySpark and this Java is, or would be; None if one of them is missing."""
    try:
        pyspark, java = version("pyspark"), find_java()
    except (PackageNotFoundError, JavaNotFound):
        return None
    release = Path(java.home, "release")
    text = f"{pyspark} {java.home} {release.read_text() if release.is_file() else java.version}"
    return Path(sys.prefix, f"{PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsa")


def jvm_options() -> str:
    """Options of a JVM that uses the archive; empty if there is none."""
    path = archive_path()
    return "" if path is None or not path.is_file() else f"-XX:SharedArchiveFile={path} {QUIET}"


def write_archive() -> None:
    """Write the archive when a session ends that has done what the tests do."""
    import tempfile

    import pyspark

    path = archive_path()
    if path is None or path.is_file():
        return
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as place:
        script = Path(place, "training.py")
        script.write_text(TRAINING)
        subprocess.run(
            [sys.executable, str(script), place],
            env={
                **os.environ,
                # Not the directory of links that a session makes: the archive has the paths of the files.
                "SPARK_HOME": pyspark.__path__[0],
                "SPARK_SUBMIT_OPTS": f"-XX:ArchiveClassesAtExit={partial} {QUIET}",
            },
            stdout=subprocess.DEVNULL,
            timeout=DEADLINE_S,
            check=True,
        )
    for other in path.parent.glob(f"{PREFIX}*.jsa"):
        other.unlink()
    partial.rename(path)


if __name__ == "__main__":
    write_archive()
