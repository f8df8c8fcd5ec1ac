"""OpenTelemetry in clients and jobs: spans, metrics and the context in headers of records."""
