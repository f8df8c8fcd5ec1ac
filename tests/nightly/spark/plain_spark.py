"""Spark with Iceberg's runtime in a process of its own: `python plain_spark.py JARS WAREHOUSE TOPIC METADATA`.

Nothing of Mansio is used here. Reads an archive by the SQLite catalog and by its metadata file, joins it, and prints
what it saw as one line of JSON.
"""

from __future__ import annotations

import glob
import json
import sys

from pyspark.sql import SparkSession


def main(jars: str, warehouse: str, topic: str, metadata: str) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", ",".join(glob.glob(f"{jars}/*.jar")))
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.catalog.mansio", "org.apache.iceberg.spark.SparkCatalog")
        .config("spark.sql.catalog.mansio.type", "jdbc")
        .config("spark.sql.catalog.mansio.uri", f"jdbc:sqlite:{warehouse}/catalog.db")
        .config("spark.sql.catalog.mansio.warehouse", f"file://{warehouse}")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    table = f"mansio.mansio.`{topic}`"
    names = spark.createDataFrame([(0, "zero"), (1, "one"), (2, "two")], "number int, name string")
    names.createOrReplaceTempView("names")
    joined = spark.sql(f"SELECT name, count(*) FROM {table} JOIN names ON __partition = number GROUP BY name")
    found = {
        "tables": [row.tableName for row in spark.sql("SHOW TABLES IN mansio.mansio").collect()],
        "rows": [
            [row[0], row[1], row[2].decode() if row[2] is not None else None]
            for row in spark.sql(f"SELECT __partition, __offset, value FROM {table} ORDER BY 1, 2").collect()
        ],
        "headers": spark.sql(f"SELECT sum(size(headers)) FROM {table} WHERE headers IS NOT NULL").collect()[
            0
        ][0],
        "by_time": spark.sql(
            f"SELECT count(*) FROM {table} WHERE __timestamp < timestamp'2023-11-14 22:13:25Z'"
        ).collect()[0][0],
        "joined": dict(joined.collect()),
        "snapshots": spark.sql(f"SELECT count(*) FROM {table}.snapshots").collect()[0][0],
        "by_metadata": spark.read.format("iceberg").load(metadata).count(),
    }
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
