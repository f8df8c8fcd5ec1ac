"""The real broker as the HTTP door sees it: reads the plain integers its parts count anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.api.http.source import Measurement, PartitionSample
from mansio.wire.versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.api.http.source import Phase
    from mansio.broker.service import Service


class ServiceView:
    """`BrokerView` of a `Service`, or of a broker that is still recovering its logs and has none yet: it answers
    probes (`starting`) from the first moment. Every method on the broker's loop."""

    def __init__(self, service: Service | None = None) -> None:
        self._service = service

    def attach(self, service: Service) -> None:
        """The broker has started."""
        self._service = service

    @property
    def phase(self) -> Phase:
        if self._service is None:
            return "starting"
        return "running" if self._service.ready else "stopping"

    def problems(self) -> Iterator[tuple[str, str]]:
        if self._service is None:
            return
        state = self._service.topics.state
        if state.failure is not None:
            yield "metadata_failed", str(state.failure)
        partitions = self._service.partitions
        for partition in partitions:
            if partition.log.failure is not None:
                yield "log_failed", f"{partition.name}: {partition.log.failure}"
        node_id = self._service.settings.node_id
        for topic in state.topics.values():
            for index, placed in enumerate(topic.partitions):
                if placed.leader == node_id and partitions.get(topic.name, index) is None:
                    yield "partition_not_open", f"{topic.name}-{index}"

    def partition_samples(self) -> Iterator[PartitionSample]:
        if self._service is None:
            return
        for partition in self._service.partitions:
            yield PartitionSample(
                topic=partition.topic,
                partition=partition.index,
                leader_epoch=partition.leader_epoch,
                start_offset=partition.start_offset,
                end_offset=partition.end_offset,
                high_watermark=partition.high_watermark,
                size_bytes=partition.log.size_bytes,
                failed=partition.log.failure is not None,
            )

    def measurements(self) -> Iterator[Measurement]:
        if self._service is not None:
            yield from _record_counts(self._service)
            yield from _port_counts(self._service)


def _record_counts(service: Service) -> Iterator[Measurement]:
    counts = service.records.counters
    yield _counter("appended_batches", "Record batches written to a log.", counts.appended_batches)
    yield _counter("appended_bytes", "Bytes of record batches written to a log.", counts.appended_bytes)
    yield _counter("refused_batches", "Record batches refused with an error.", counts.refused_batches)
    yield _counter("fetches", "Fetch requests answered.", counts.fetches)
    yield _counter("fetched_bytes", "Bytes of records handed to consumers.", counts.fetched_bytes)


def _port_counts(service: Service) -> Iterator[Measurement]:
    server = service.server
    if server is None:
        return
    counts = server.counters
    for key, requests in counts.requests.items():
        yield Measurement(
            "requests",
            "counter",
            "Kafka requests received.",
            (("api", ApiKey(key).name.lower()),),
            requests,
        )
    yield _counter("connection_errors", "Kafka connections closed for what they sent.", counts.errors)
    yield _counter("connections_accepted", "Kafka connections accepted.", counts.connections_accepted)
    yield _counter(
        "connections_refused", "Kafka connections refused at the bound.", counts.connections_refused
    )


def _counter(name: str, meaning: str, value: float) -> Measurement:
    return Measurement(name, "counter", meaning, (), value)
