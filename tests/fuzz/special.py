"""Devices, pipes, sockets and links in places where files and folders are expected, to read and to write."""

from __future__ import annotations

from random import Random

from tests.fuzz.case import Case
from tests.fuzz.damage import FOLDERS, SAMPLES

MODEL = SAMPLES / "cond_v1.pb"
RULES = b"version: 1\nstreams: 2\nrules:\n  - regex: {file: streams.txt}\n  - branch\n"
PLAIN = ("--rules", "default")  # where no rules are tried: these plan nothing, and files are what is timed
PLACES = ["model/there", "model/assets/there", "model/variables/there", "model/assets.extra/deep/there"]


# What `Case.special` says. To write over, only what is the case's own: the machine's devices are not put at risk.
OWN = ["pipe", "socket", "null", "zero", "link:pipe", "link:gone"]
ANY = [*OWN, "link:/dev/zero", "link:/dev/random", "link:/dev/tty", "link:/proc/self/mem"]
# Links that lead to files and folders, some of them in a circle, some to what has no size or to other processes' things.
LINKS = [
    "link:.",
    "link:..",
    "link:there0",
    "link:/proc/self/maps",
    "link:/proc/self/fd",
    "link:/etc/hostname",
    "link:/dev/fd",
]


def make(seed: int) -> Case:
    """A model, rules or an output that is, or has in it, something that no program may wait for, copy or replace."""
    random = Random(f"special:{seed}")
    name = f"special:{seed}"
    where = random.random()
    model = MODEL.read_bytes()
    if where < 0.4:
        folder = SAMPLES / random.choice([name for name in FOLDERS if name != "two_tags"])
        files = {
            f"model/{path.relative_to(folder)}": path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != "saved_model.pb"
        }
        count = random.choice([1, 1, 2, 6])
        special = {
            place: random.choice(ANY if random.random() < 0.6 else LINKS)
            for place in random.sample([f"{place}{number}" for place in PLACES for number in range(3)], count)
        }
        content = (folder / "saved_model.pb").read_bytes()
        return Case(name, content, saved=True, files=files, assign=PLAIN, special=special)
    force = ("--force",) if random.random() < 0.7 else ()
    if where < 0.65:
        targets = random.sample(["out", "out.plan", "out.streams"], random.choice([1, 1, 2]))
        return Case(name, model, assign=PLAIN + force, special={target: random.choice(OWN) for target in targets})
    read = random.choice(["rules.yaml", "streams.txt", "settings.yaml", "plan.json", "profile.json", "model"])
    files = {
        "rules.yaml": RULES,
        "streams.txt": b"1:a\n",
        "settings.yaml": b"",
        "plan.json": b"{}",
        "profile.json": b"{}",
    }
    files.pop(read, None)
    assign = {"profile.json": (*PLAIN, "--costs", "profile=profile.json")}.get(read, ("--rules", "rules.yaml"))
    check = {"settings.yaml": ("--config", "settings.yaml"), "plan.json": ("--plan", "plan.json")}.get(read, ())
    return Case(name, model, files=files, assign=assign + force, check=check, special={read: random.choice(ANY)})
