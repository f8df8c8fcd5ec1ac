"""Hot partitions of a broker: rates of the partitions that it leads, and the frequent keys of the hot ones."""
