"""Loop protection: each copy of a record names the clusters that the record has passed, in headers.

A copy gets one header `mansio-mirror-cluster` with the id of the cluster that it was read from, after the headers that
the record already has. A record is not copied to a cluster that it names. So mirrors in both directions, or in a
circle, copy each record once to each cluster, also if all topics have the same name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mansio.spark.arrow.schema import HEADERS_TYPE

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLUSTER_HEADER: Final = "mansio-mirror-cluster"
"""Header with the id of a cluster that the record has passed; one for each."""


def has_passed(headers: pa.ListArray, cluster_id: str) -> NDArray[np.bool_]:
    """Whether each record names the cluster."""
    found = np.zeros(len(headers), np.bool_)
    flat = headers.flatten()
    if len(flat):
        is_named = pc.and_(
            pc.equal(pc.struct_field(flat, "key"), CLUSTER_HEADER),
            pc.equal(pc.struct_field(flat, "value"), cluster_id.encode()),
        ).fill_null(False)
        rows = pc.list_parent_indices(headers).to_numpy()
        found[rows[is_named.to_numpy(zero_copy_only=False)]] = True
    return found


def add_cluster(headers: pa.ListArray, cluster_id: str) -> pa.ListArray:
    """Return the headers of each record, and one that names the cluster."""
    flat = headers.flatten()
    counts = pc.fill_null(pc.list_value_length(headers), 0).to_numpy().astype(np.int64)
    ends = np.cumsum(counts + 1)
    take = np.full(int(ends[-1]) if len(ends) else 0, len(flat), np.int64)
    is_own = np.ones(len(take), np.bool_)
    is_own[ends - 1] = False
    take[is_own] = np.arange(len(flat))
    added = pa.array([cluster_id.encode()], pa.binary())
    names = pa.concat_arrays([pc.struct_field(flat, "key"), pa.array([CLUSTER_HEADER])]).take(pa.array(take))
    values = pa.concat_arrays([pc.struct_field(flat, "value"), added]).take(pa.array(take))
    offsets = np.concatenate(([0], ends)).astype(np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.StructArray.from_arrays([names, values], ["key", "value"]), type=HEADERS_TYPE
    )
