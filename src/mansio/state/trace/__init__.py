"""Traces of records without I/O: the rows that a broker collects, and the timeline of a record that they give."""
