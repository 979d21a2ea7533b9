"""Requests without their values, in C: what is damaged is left alone, and nothing is read or written beyond its end."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from msplit.engines.environment import HOST_OPS
from msplit.engines.host import hashing
from tests.serving.server.test_large import field, varint

TEXTS = b"\x08\x07" + field(2, field(2, b"\x08\x03")) + field(8, b"a") + field(8, b"") + field(8, b"\xff" * 200)
NUMBERS = b"\x08\x01" + field(2, field(2, b"\x08\x02")) + field(5, bytes(8))
REQUEST = field(1, b"m") + field(2, field(1, b"s") + field(2, TEXTS)) + field(2, field(2, NUMBERS) + field(1, b"x"))
INFER = field(1, b"m") + field(5, field(1, b"s") + field(5, field(8, b"a") + field(8, b"bc"))) + field(7, bytes(8))
DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include "%s"

int main(void) {
  int64_t head[4], good = 0;
  while (fread(head, 8, 4, stdin) == 4) {
    uint8_t *data = malloc(head[1]);
    View *values = malloc(head[2] * sizeof *values + head[3]);
    if (fread(data, 1, head[1], stdin) != (size_t)head[1]) return 1;
    int64_t size = take_values(head[0], data, head[1], values, head[2], head[3]), count = 0;
    if (size >= 0) {
      good++;
      memcpy(&count, values + head[2], 8);
      for (int64_t i = 0; i < count; i++) /* all of them can be read */
        for (int64_t j = 0; j < values[i].n; j++)
          good += 0 * ((uint64_t)values[i].p < (uint64_t)head[1] ? data + (uint64_t)values[i].p : values[i].p)[j];
    }
    free(data);
    free(values);
  }
  printf("%%ld", (long)good);
  return 0;
}
"""


def test_equal_rests_have_their_values_in_the_same_places() -> None:
    if hashing.native() is None:
        pytest.skip("nothing is compiled")
    other = field(1, b"m") + field(2, field(1, b"s") + field(2, TEXTS.replace(b"\x01a", b"\x01b")))
    other += field(2, field(2, NUMBERS.replace(bytes(8), b"12345678")) + field(1, b"x"))
    found = []
    for data in (REQUEST, other):
        rest, values = hashing.values_of(data, infers=False) or (b"", memoryview(b""))
        numbers = values[:8].tolist()
        texts = hashing.Texts((3,), hashing.VIEW, values[:6].tobytes())
        found.append((rest, hashing.as_objects(texts).tolist(), data[numbers[6] :][: numbers[7]]))
    assert found[0] == (found[1][0], [b"a", b"", b"\xff" * 200], bytes(8))
    assert found[1][1:] == ([b"b", b"", b"\xff" * 200], b"12345678")
    assert found[0][0][:8] == struct.pack("<q", 4)


@pytest.mark.parametrize(
    "other",
    [
        REQUEST.replace(bytes(8), bytes(4)).replace(field(5, bytes(8))[:2], field(5, bytes(4))[:2]),
        field(1, b"n") + REQUEST[3:],
        REQUEST + field(1, b"m"),
        field(2, field(1, b"s") + field(2, TEXTS + field(8, b""))),
        field(2, field(1, b"s") + field(2, field(8, b"a") + TEXTS)),
    ],
)
def test_requests_that_differ_in_more_than_values_have_other_rests(other: bytes) -> None:
    if hashing.native() is None:
        pytest.skip("nothing is compiled")
    assert (hashing.values_of(REQUEST, infers=False) or b"")[0] != (hashing.values_of(other, infers=False) or b" ")[0]


@pytest.mark.parametrize(
    "data",
    [
        REQUEST[:-1],
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x12\x80",
        b"\x00\x00",
        b"\x13\x14",
        b"\x12" + varint(1 << 62),
        b"\x80" * 12,
        field(2, field(2, b"\x42\x05a")),
        field(9, bytes(1 << 16)),
        field(2, field(2, field(8, b"") * ((1 << 16) + 1))),
        b"\x92" + b"\x80" * 8 + b"\x02" + REQUEST[REQUEST.index(b"\x12") + 1 :],
        field(2, field(2, b"\x08\x01\x2d" + bytes(4))),
        field(2, field(2, b"\x08\x09\x50\x01")),
    ],
)
def test_what_is_damaged_or_too_much_is_left_alone(data: bytes) -> None:
    assert hashing.values_of(data, infers=False) is None
    assert hashing.values_of(bytearray(data), infers=False) is None  # type: ignore[arg-type]


def test_nothing_is_touched_beyond_its_end(tmp_path: Path) -> None:
    """As the compiler's sanitizers see it, of requests that are damaged at random, with room for all of them and for less."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "driver.c").write_text(DRIVER % HOST_OPS.with_suffix(".c"))
    program = tmp_path / "driver"
    flags = ["-g", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    made = subprocess.run(
        [compiler, *flags, tmp_path / "driver.c", "-o", program, "-lm"], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no sanitizers: {made.stderr[-200:]}")
    draw, cases = random.Random(0), []
    for number in range(6000):
        infers = number % 2
        data = bytearray(INFER if infers else REQUEST)
        for _ in range(draw.randrange(4)):
            data[draw.randrange(len(data))] = draw.choice([0, 1, 0x12, 0x42, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        data = data[: draw.randrange(len(data) + 1)] if draw.random() < 0.3 else data
        most, room = draw.choice([(0, 0), (2, 7), (1, 4096), (64, 40), (64, 4096), (64, 4096)])
        cases.append(struct.pack("<4q", infers, len(data), most, room) + data)
    ran = subprocess.run([program], input=b"".join(cases), capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode(errors="replace")[-2000:]
    assert int(ran.stdout) > 1000
