"""The Python client: asyncio and blocking, the same names, over `mansio.link`.

`connect` gives an asyncio `Client`; `blocking.connect` its blocking twin.
"""

from . import blocking
from .accumulator import Delivery
from .admin import (
    Admin,
    ClusterDescription,
    ConfigEntry,
    PartitionLag,
    TopicDescription,
)
from .client import Client, connect
from .consumer import Consumer
from .group_description import GroupDescription, GroupMember
from .group_listing import GroupListing, GroupListings
from .producer import Producer, ProducerOptions
from .types import Headers, Message, OutgoingRecord, RecordMetadata, StartAt, TopicPartition

__all__ = [
    "Admin",
    "Client",
    "ClusterDescription",
    "ConfigEntry",
    "Consumer",
    "Delivery",
    "GroupDescription",
    "GroupListing",
    "GroupListings",
    "GroupMember",
    "Headers",
    "Message",
    "OutgoingRecord",
    "PartitionLag",
    "Producer",
    "ProducerOptions",
    "RecordMetadata",
    "StartAt",
    "TopicDescription",
    "TopicPartition",
    "blocking",
    "connect",
]
