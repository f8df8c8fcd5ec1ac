"""Sound bytes made unsound: the mutations all fuzz tests share. Same random numbers, same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

EDGES = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\xff\x0f",
)


def mutated(random: Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(out) + 1)
        kind = random.randrange(6)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            edge = random.choice(EDGES)
            out[at : at + len(edge)] = edge
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            del out[at : at + random.randrange(1, 5)]
        elif kind == 4:
            out[at:at] = random.randbytes(random.randrange(1, 5))
        else:
            out[at:at] = out[random.randrange(len(out) + 1) :][:40]
    return bytes(out)


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data
