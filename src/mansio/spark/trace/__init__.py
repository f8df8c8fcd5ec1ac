"""The trace of records in Arrow columns, and the deliveries of the records of a topic as a table."""
