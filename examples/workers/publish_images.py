"""Publish small grayscale images (PGM) to the topic `images`; two of them are broken."""

import numpy as np

import mansio

COUNT, WIDTH, HEIGHT = 48, 64, 48
BROKEN = b"P5 64 48 255\n only the first bytes arrived"
NO_IMAGE = b"%PDF-1.7"

random = np.random.default_rng(7)
with mansio.blocking.connect() as client:
    for number in range(COUNT):
        pixels = random.integers(0, 256, (HEIGHT, WIDTH), dtype=np.uint8)
        value = b"P5 %d %d 255\n" % (WIDTH, HEIGHT) + pixels.tobytes()
        if number == 13:
            value = BROKEN
        if number == 31:
            value = NO_IMAGE
        client.publish("images", value, key=f"image-{number}")
print(f"published {COUNT} images")
