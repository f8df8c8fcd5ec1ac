"""Python client of Mansio and Kafka brokers: asyncio and blocking, with the same API.

`connect` creates an asyncio `Client`; `blocking.connect` a blocking one.
"""

from mansio.client import blocking
from mansio.client.admin.admin import Admin, ClusterDescription, ConfigEntry, PartitionLag, TopicDescription
from mansio.client.admin.groups import GroupDescription, GroupListing, GroupListings, GroupMember
from mansio.client.client import Client, connect
from mansio.client.consumer.consumer import Consumer
from mansio.client.producer.accumulator import Delivery
from mansio.client.producer.producer import Producer, ProducerOptions
from mansio.client.share.leased import Leased
from mansio.client.share.receiver import Receiver
from mansio.client.types import Headers, Message, OutgoingRecord, RecordMetadata, StartAt, TopicPartition

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
