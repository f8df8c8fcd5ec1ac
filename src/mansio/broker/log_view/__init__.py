"""Views of a partition's log: state that is derived from its batches, replay of the log, and snapshots."""
