"""Administration client: topics, settings, quotas, groups, share groups and the cluster (`client.admin`)."""
