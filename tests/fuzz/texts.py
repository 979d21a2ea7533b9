"""Rules, stream files, settings, plans and profiles that a stranger wrote."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.case import Case
from tests.fuzz.damage import damaged

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "sample_graphs" / "cond_v1.pb"
RULES = ["manual", "regex", "embedding", "branch", "colocation", "propagate", "auto", "placement", "gone"]
KEYS = [
    "version",
    "streams",
    "rules",
    "default",
    "patterns",
    "file",
    "match",
    "balance",
    "min_cost_us",
    "ops",
    "handles",
    "include_zero",
    "select",
    "ignore",
    "severity",
    "fail_on",
    "fork_streams",
    "hand_set",
    "plan",
    "batch",
    "gpu",
    "shapes",
    "limits",
    "min_gain",
]
PATTERNS = [
    "a.*",
    "(a+)+$",
    "((a*)*)*b",
    "(a|aa)+$",
    "a{1000}",
    "(a{1000}){1000}",
    "(?=a)b",
    r"(a)\1",
    "[",
    "(",
    "a{,9}",
    "*",
    "",
    ".*.*.*.*=.*",
    r"\p{L}+",
    "[^a]",
    "(?i)cond/.*",
    "x" * 2000,
    r"\x{10FFFF}",
    "|" * 500,
    "(" * 300 + ")" * 300,
    "a{0,1000}" * 20,
    r"\Qa*\E",
    "$^",
    "a\x00b",
]
SCALARS = [
    "0",
    "1",
    "4",
    "-1",
    "1e309",
    ".nan",
    ".inf",
    "~",
    "true",
    "[]",
    "{}",
    "1_000",
    "0x7fffffffffffffffffff",
    "2001-01-01",
    '"a"',
    "!!python/object:os.system x",
    "*a",
    "&a 1",
    "!!binary aa",
    "9" * 5000,
    "default",
    "regex",
    "1024",
    "1025",
    "'" + "x" * 3000 + "'",
    "? x",
    "<<: {}",
    "2:30",
]


def _yaml(random: Random, depth: int = 0) -> str:
    """A value in flow style."""
    kind = random.random()
    if depth > 4 or kind < 0.5:
        return random.choice([*SCALARS, json.dumps(random.choice(PATTERNS))])
    if kind < 0.75:
        return "[" + ", ".join(_yaml(random, depth + 1) for _ in range(random.randrange(4))) + "]"
    keys = [random.choice([*KEYS, *RULES, "1", "0", "-1", "[a]"]) for _ in range(random.randrange(4))]
    return "{" + ", ".join(f"{key}: {_yaml(random, depth + 1)}" for key in keys) + "}"


def rules(random: Random) -> bytes:
    """A rules file."""
    kind = random.random()
    if kind < 0.2:
        shipped = sorted((ROOT / "rules").glob("*.yaml"))
        return damaged(random.choice(shipped).read_bytes(), random)
    if kind < 0.3:
        return random.choice(
            [
                ("[" * random.choice([10, 100, 5000, 100_000])).encode(),
                ("{a: " * random.choice([10, 100, 5000])).encode(),
                ("- " * random.choice([100, 20_000])).encode(),
                b"a: &a [x]\nb: &b [*a,*a,*a]\nc: &c [*b,*b,*b]\n" * 3,
                ("k: v\n" * 20_000).encode(),
                b"version: 1\nrules: " + b"[" * 20 + b"]" * 20,
                ("? " * 3000).encode(),
                ('"' + "\\" * 9999).encode(),
                ("version: 1\nrules:\n" + "  - branch\n" * 5000).encode(),
                ("#" * 100_000).encode(),
                ("%YAML 9.9\n" * 20).encode(),
            ]
        )
    lines = ["version: 1"] if random.random() < 0.9 else []
    if random.random() < 0.8:
        lines.append(f"streams: {random.choice(['2', '4', '4', random.choice(SCALARS)])}")
    lines.append("rules:")
    for _ in range(random.randrange(6)):
        rule = random.choice(RULES)
        if rule == "regex" or random.random() < 0.2:
            chosen = ", ".join(
                f"{random.randrange(5)}: {json.dumps(random.choices(PATTERNS, k=2))}"
                for _ in range(random.randrange(3))
            )
            lines.append(f"  - regex: {{patterns: {{{chosen}}}, match: {random.choice(['full', 'search', 'x'])}}}")
        else:
            lines.append(f"  - {rule}" if random.random() < 0.6 else f"  - {rule}: {_yaml(random)}")
    for _ in range(random.choice([0, 0, 1, 2])):
        lines.append(f"{random.choice(KEYS)}: {_yaml(random)}")
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def stream_file(random: Random) -> bytes:
    """NVIDIA's format."""
    if random.random() < 0.2:
        return random.choice(
            [
                b"",
                b"1",
                b":",
                b"1:",
                b"1:a\x00",
                b"\xff\xfe1:a",
                b"1:" + b"a," * 20_000,
                b"1:a\r\n2:b\r\n",
                b"\n" * 50_000,
                b"9" * 50_000 + b":a",
                b"1:" + b"(" * 20_000,
                b"1:" + b"[" * 20_000,
                b"1:" + b"\\" * 20_001,
            ]
        )
    lines = [
        f"{random.choice(['0', '1', '2', '3', '-1', ' 1', '99999999999', 'x', ''])}{random.choice([':', ':', ':', '', '::'])}"
        + ",".join(random.choices(PATTERNS, k=random.randrange(1, 5)))
        for _ in range(random.randrange(1, 12))
    ]
    return "\n".join(lines).encode()


def settings(random: Random) -> tuple[str, bytes]:
    """msplit.yaml or pyproject.toml."""
    if random.random() < 0.6:
        body = "\n".join(f"{random.choice(KEYS)}: {_yaml(random)}" for _ in range(random.randrange(6)))
        return "settings.yaml", body.encode("utf-8", "surrogatepass")
    values = [
        "1",
        "[]",
        "{}",
        '"a"',
        "1e999",
        "nan",
        "-5",
        "2001-01-01",
        "['MS0']",
        "{MS012 = 'error'}",
        "{MS999 = 'error'}",
        "'''\n[" + " " * 20_000 + "\n'''",
        "'''\n" + "a " * 20_000 + "\n'''",
        "[" * 2000,
        "{a = [1, 2, 'x']}",
        "99999999999999999999999",
        "true",
    ]
    body = "[tool.msplit]\n" + "\n".join(
        f"{random.choice(KEYS)} = {random.choice(values)}" for _ in range(random.randrange(6))
    )
    return "settings.toml", body.encode()


@cache
def _plan() -> Any:
    from msplit import api
    from msplit.schedule import planfile

    flat = api.load(MODEL)
    return planfile.dump(api.assign(flat).plan, flat)


def _changed(value: Any, random: Random, odds: float) -> Any:
    if random.random() < odds:
        return random.choice(
            [
                None,
                True,
                -1,
                0,
                1,
                2**31,
                2**63,
                10**400,
                1e308,
                "",
                "gone",
                [],
                {},
                [[]],
                [["x"]],
                [["x", 1, 2]],
                "\ud800",
            ]
        )
    if isinstance(value, list):
        items = [_changed(item, random, odds) for item in value]
        return items + items[:3] if random.random() < odds else items
    if isinstance(value, dict):
        return {
            key if random.random() > odds else f"{key}x": _changed(item, random, odds) for key, item in value.items()
        }
    return value


def json_file(random: Random, real: Any) -> bytes:
    """A JSON file: a real one with changes, with damaged bytes, or something else."""
    if random.random() < 0.15:
        return random.choice(
            [
                b"",
                b"[" * 100_000,
                b'{"a":' * 50_000,
                b"9" * 10_000,
                b"NaN",
                b"1e999999",
                b"\xef\xbb\xbf{}",
                b'"\\ud800"',
                b"null",
                b"[1,]",
            ]
        )
    text = json.dumps(_changed(real, random, random.choice([0.0, 0.01, 0.05, 0.3]))).encode()
    return damaged(text, random, 3) if random.random() < 0.3 else text


def make(seed: int) -> Case:
    """A real model with a file beside it that is not."""
    random = Random(f"text:{seed}")
    name, model = f"text:{seed}", MODEL.read_bytes()
    match random.randrange(6):
        case 0 | 1:
            return Case(
                name, model, files={"r.yaml": rules(random)}, assign=("--rules", "r.yaml"), check=("--rules", "r.yaml")
            )
        case 2:
            around = b"version: 1\nstreams: 4\nrules:\n  - regex: {file: s.txt}\n  - propagate\n"
            return Case(
                name,
                model,
                files={"s.txt": stream_file(random), "r.yaml": around},
                assign=("--rules", "r.yaml"),
                check=("--rules", "r.yaml"),
            )
        case 3:
            file, content = settings(random)
            return Case(name, model, files={file: content}, check=("--config", file))
        case _:
            return Case(name, model, files={"p.json": json_file(random, _plan())}, check=("--plan", "p.json"))
