"""What the importer of Perfetto would complain about, as a function. It reads times as whole nanoseconds, cutting off the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def complaints(trace: Mapping[str, Any]) -> list[str]:
    """One sentence per fault; empty for a trace that opens without warnings."""
    events = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    found: list[str] = []
    last = 0
    open_slices: dict[tuple[int, int], list[tuple[int, int]]] = {}
    started: dict[int, tuple[int, tuple[str, str]]] = {}
    ended: set[int] = set()
    named = {
        (event["pid"], event["tid"])
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    for event in events:
        at = int(event["ts"] * 1000)
        track = (event["pid"], event["tid"])
        if at < 0:
            found.append(f"negative time: {event}")
        if at < last:
            found.append(f"out of order: {event}")
        last = max(last, at)
        if track not in named:
            found.append(f"track without a name: {event}")
        stack = open_slices.setdefault(track, [])
        while stack and stack[-1][1] <= at:
            stack.pop()
        if event["ph"] == "X":
            length = int(event["dur"] * 1000)
            if length <= 0:
                found.append(f"no duration: {event}")
            if stack and at + length > stack[-1][1]:
                found.append(f"overlaps without nesting: {event}")
            stack.append((at, at + length))
        elif event["ph"] == "s":
            if event["id"] in started:
                found.append(f"flow starts twice: {event}")
            if not stack:
                found.append(f"flow starts on no slice: {event}")
            started[event["id"]] = (at, (event["cat"], event["name"]))
        elif event["ph"] == "f":
            if event.get("bp") != "e" or not stack:
                found.append(f"flow ends on no slice: {event}")
            if event["id"] not in started:
                found.append(f"flow ends without a start: {event}")
            elif started[event["id"]][1] != (event["cat"], event["name"]):
                found.append(f"flow changes its name: {event}")
            if event["id"] in ended:
                found.append(f"flow ends twice: {event}")
            ended.add(event["id"])
        else:
            found.append(f"unknown event: {event}")
    found += [f"flow never ends: {number}" for number in started.keys() - ended]
    return found
