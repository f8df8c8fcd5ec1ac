"""All features of partitions that this broker knows, and their order (`KNOWN_FEATURES`).

A partition gets them by its constructor. It attaches a feature when its settings or its files need it, also while it is
served; the feature stays attached until the partition is closed, because the log keeps what the feature has written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.broker.features.deduplication.deduplication_feature import DeduplicationFeature
from mansio.broker.features.delays.delay_feature import DelayFeature
from mansio.broker.features.holds.retention_hold_feature import RetentionHoldFeature
from mansio.broker.features.priorities.priority_feature import PriorityFeature
from mansio.broker.features.schema_validation.schema_validation_feature import SchemaValidationFeature

if TYPE_CHECKING:
    from mansio.broker.features.feature_ports import FeaturePorts
    from mansio.broker.partition.partition import PartitionFeature

KNOWN_FEATURES: Final = (
    RetentionHoldFeature,
    SchemaValidationFeature,
    PriorityFeature,
    DeduplicationFeature,
    DelayFeature,
)
"""The features in the order in which they read a batch and take part in its append: the schemas of a batch are checked
before its repeats are left out, and a delayed record counts as accepted for deduplication. A batch with invalid headers
of several features is rejected for the first one."""


def create_features(ports: FeaturePorts) -> tuple[PartitionFeature, ...]:
    """Create all features of a broker, in their order."""
    return tuple(kind(ports) for kind in KNOWN_FEATURES)
