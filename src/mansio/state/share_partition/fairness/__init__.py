"""Fairness by key of a share group (`mansio.share.fair`): keys with a backlog are isolated from the others."""
