"""Registration of this broker in the cluster: cluster id, session, re-registration."""
