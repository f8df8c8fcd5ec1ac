"""HTTP/JSON API of a broker, under `/v1`: topics, records, share groups, delayed records, schedules, dead letters."""
