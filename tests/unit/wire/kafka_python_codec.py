"""kafka-python's codec modules; importing them on Python 3.11 and later warns, and warnings are errors here."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka.codec as kafka_codec
    import kafka.record.default_records as kafka_records

__all__ = ["kafka_codec", "kafka_records"]
