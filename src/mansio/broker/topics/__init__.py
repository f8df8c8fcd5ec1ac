"""Topics of the cluster: creation, settings and deletion in the metadata store."""
