"""Hot partitions without I/O: which partitions are hot, their most frequent keys, and what helps."""
