"""The job `mirror`: copies topics to another cluster, with the offsets of their groups. It runs without Spark."""
