"""State machines without I/O: groups, share partitions, replicas, producers, quotas."""
