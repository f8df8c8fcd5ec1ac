"""Mansio's source and Iceberg's runtime in one session: `python topic_and_table.py JARS WAREHOUSE TOPIC BOOTSTRAP`.

Joins the records of a topic with a table by Iceberg's own reader, writes the result into a new table by Iceberg's own
writer, and prints the number of its rows.
"""

from __future__ import annotations

import glob
import sys

from mansio.spark import session


def main(jars: str, warehouse: str, topic: str, bootstrap_servers: str) -> None:
    spark = session(
        "local[2]",
        **{
            "spark.jars": ",".join(glob.glob(f"{jars}/*.jar")),
            "spark.sql.catalog.mansio": "org.apache.iceberg.spark.SparkCatalog",
            "spark.sql.catalog.mansio.type": "jdbc",
            "spark.sql.catalog.mansio.uri": f"jdbc:sqlite:{warehouse}/catalog.db",
            "spark.sql.catalog.mansio.warehouse": f"file://{warehouse}",
        },
    )
    options = {"kafka.bootstrap.servers": bootstrap_servers, "subscribe": topic}
    records = spark.read.format("mansio").options(**options).load().select("partition", "offset", "key")
    table = spark.table(f"mansio.mansio.`{topic}`")
    matches = (records["partition"] == table["__partition"]) & (records["offset"] == table["__offset"])
    spark.sql("CREATE NAMESPACE mansio.results")
    joined = records.join(table, matches).select("partition", "offset", table["value"])
    joined.writeTo("mansio.results.joined").create()
    print(spark.table("mansio.results.joined").count())
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
