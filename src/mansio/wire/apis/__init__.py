"""Codecs of single APIs, both directions."""
