"""A share group as a source of Spark: batches of leased records, with more tasks than partitions."""
