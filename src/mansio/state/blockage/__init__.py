"""Blockage of a group: what keeps it from going on, found from facts of its coordinator and of the leaders."""
