"""Features of ApiVersions and UpdateFeatures (KIP-584)."""

from __future__ import annotations

from typing import Final

VERSION_FEATURE: Final = "mansio.version"
"""Feature whose level is the feature level of a cluster (`metadata.feature_level`)."""
FIRST_LEVEL: Final = 1
"""Feature level of 0.1, which does not announce it."""

FIXED_FEATURES: Final = {"transaction.version": 2}
"""Features whose level does not change. Clients bump the epoch with each transaction and skip AddPartitionsToTxn from
`transaction.version` 2 on (KIP-890)."""

UPGRADE: Final = 1
"""Type of an update that may raise a level (KIP-778)."""
SAFE_DOWNGRADE: Final = 2
"""Type of an update that may lower a level if nothing is lost (KIP-778)."""
