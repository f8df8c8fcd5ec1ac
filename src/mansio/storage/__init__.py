"""One log on disk, through `mansio.ports`: segments, indexes, epochs, recovery, and who is durable up to where."""
