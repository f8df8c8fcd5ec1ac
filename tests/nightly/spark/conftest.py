"""The session and the broker of the Spark tests, for those of the night."""

from system.spark.conftest import (
    broker_process,
    pytest_collection_modifyitems,
    pytest_configure,
    spark,
    spark_cluster,
    topic_name,
)

__all__ = [
    "broker_process",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "spark",
    "spark_cluster",
    "topic_name",
]
