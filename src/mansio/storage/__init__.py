"""One log on disk: segments, indexes, leader epochs, flush, recovery."""
