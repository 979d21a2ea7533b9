"""Real files with damaged bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

from tests.fuzz.case import Case

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
FILES = [
    "cond_v1.pb",
    "while_v1.pb",
    "custom_op.pb",
    "annotated.pb",
    "mmoe_small.pb",
    "towers_small.pb",
    "training.meta",
]
TEXTS = ["mmoe_small.pbtxt"]
FOLDERS = ["two_signatures", "two_tags", "tf1_saved_model", "control_flow_v2", "keras_lookup"]
LENGTHS = [b"\x00", b"\x7f", b"\xff\x7f", b"\xff\xff\xff\xff\x07", b"\xff" * 9 + b"\x01", b"\x80" * 12]
"""Lengths as varints, the last one without an end."""


@cache
def _content(name: str) -> bytes:
    path = SAMPLES / name
    return (path / "saved_model.pb" if path.is_dir() else path).read_bytes()


def damaged(data: bytes, random: Random, most: int = 8) -> bytes:
    """The bytes with a few of them changed, dropped, doubled or replaced by lying lengths."""
    content = bytearray(data)
    for _ in range(random.randint(1, most)):
        place = random.randrange(len(content) + 1)
        end = min(len(content), place + random.choice([1, 1, 2, 4, 16, 200]))
        match random.randrange(7):
            case 0 if content:
                content[place - 1] ^= 1 << random.randrange(8)
            case 1 if content:
                content[place - 1] = random.randrange(256)
            case 2:
                del content[place:end]
            case 3:
                content[place:place] = content[place:end]
            case 4:
                content[place:place] = random.choice(LENGTHS)
            case 5:
                content[place:end] = random.choice(LENGTHS)
            case _:
                other = random.randrange(len(content) + 1)
                content[place:end] = content[other : other + end - place]
    return bytes(content[: random.randrange(len(content) + 1)] if random.random() < 0.05 else content)


def make(seed: int) -> Case:
    """A damaged model, or bytes that never were one."""
    random = Random(f"damage:{seed}")
    kind = random.random()
    name = f"damage:{seed}"
    if kind < 0.04:
        return Case(name, random.randbytes(random.choice([0, 1, 2, 10, 100, 5000])))
    if kind < 0.12:
        # Numbers of fields and types of wires, with lengths that lie.
        parts = [
            bytes([random.randrange(128)]) + random.choice(LENGTHS) + random.randbytes(random.randrange(20))
            for _ in range(random.randrange(60))
        ]
        return Case(name, b"".join(parts))
    file = random.choice([*FILES, *FILES, *TEXTS, *FOLDERS])
    return Case(name, damaged(_content(file), random), saved=file in FOLDERS)
