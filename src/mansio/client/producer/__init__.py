"""Producer: collects records in batches, sends the batches to brokers and reports the result of each record."""
