"""Transactions: the service of the coordinator, the markers in partitions, and the verification of batches."""
