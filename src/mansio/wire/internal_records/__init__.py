"""Codecs of the records in internal topics, and of what clients embed in group protocols and committed offsets."""
