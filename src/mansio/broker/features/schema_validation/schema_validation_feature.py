"""Validation of the schemas of records at publish as a feature of partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.features.schema_validation.schema_validator import SchemaValidator, reader_of
from mansio.broker.partition.partition import Attached, PartitionFeature

if TYPE_CHECKING:
    from mansio.broker.features.feature_ports import FeaturePorts
    from mansio.broker.partition.append_validation import RecordReader
    from mansio.broker.partition.partition import Partition
    from mansio.config.topic_config import TopicSettings


class SchemaValidationFeature(PartitionFeature):
    """Validation of the schemas of keys and values. It stores nothing."""

    def __init__(self, ports: FeaturePorts) -> None:
        self._ports = ports

    def is_needed(self, partition: Partition) -> bool:
        return reader_of(partition.settings) is not None

    def reader(self, settings: TopicSettings) -> RecordReader | None:
        return reader_of(settings)

    def attach(self, partition: Partition, *, is_new: bool) -> Attached:
        del is_new
        validator = SchemaValidator(partition, self._ports)
        return Attached(validator, None, appends=validator)
