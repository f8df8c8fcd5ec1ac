"""Halve the images of a topic. What is no image is rejected; what is incomplete is retried."""

import numpy as np
from pyspark.sql import DataFrame, Row

from mansio.spark import work


def halve(row: Row) -> dict[str, bytes]:
    """Return an image of half the width and height."""
    header, _, pixels = row.value.partition(b"\n")
    if not header.startswith(b"P5 "):
        raise work.Reject("not a grayscale image")
    width, height = map(int, header.split()[1:3])
    image = np.frombuffer(bytes(pixels), np.uint8).reshape(height, width)
    small = image.reshape(height // 2, 2, width // 2, 2).mean(axis=(1, 3)).astype(np.uint8)
    return {"value": b"P5 %d %d 255\n" % (width // 2, height // 2) + small.tobytes()}


def transform(frame: DataFrame) -> DataFrame:
    """Return the images with their results and errors."""
    return work.apply(frame, halve, schema="value binary")
