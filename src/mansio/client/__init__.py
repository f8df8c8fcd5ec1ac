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
from .leased_types import DelayNotOffered, Leased, LeaseLost
from .producer import Producer, ProducerOptions
from .receive import Receiver
from .types import Headers, Message, OutgoingRecord, RecordMetadata, StartAt, TopicPartition

__all__ = [
    "Admin",
    "Client",
    "ClusterDescription",
    "ConfigEntry",
    "Consumer",
    "DelayNotOffered",
    "Delivery",
    "GroupDescription",
    "GroupListing",
    "GroupListings",
    "GroupMember",
    "Headers",
    "LeaseLost",
    "Leased",
    "Message",
    "OutgoingRecord",
    "PartitionLag",
    "Producer",
    "ProducerOptions",
    "Receiver",
    "RecordMetadata",
    "StartAt",
    "TopicDescription",
    "TopicPartition",
    "blocking",
    "connect",
]
