"""REST API of the schema registry, as Confluent's: under `/registry` of the HTTP listener, or on its own listener."""
