"""Commands that administer a cluster: topics, groups, quotas, configuration."""
