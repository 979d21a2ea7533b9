"""Writes docs/checks.md from the checks themselves, and docs/schemas/ from the package:  python scripts/make_check_docs.py"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from msplit.checks.run import CHECKS
from msplit.report.findings import page

DOCS = Path(__file__).parents[1] / "docs"

INTRODUCTION = """\
# Checks

<!-- Written by scripts/make_check_docs.py from msplit/checks. Do not edit: a test compares. -->

    msplit check MODEL… [--rules FILE] [--plan FILE] [--against OLD] [--select/--ignore CODES] [--config FILE]
                       [--batch N] [--shape NAME=D,D,…] [--costs KEY=VALUE]
                       [--format table|json|md|github|junit|sarif] [--fail-on SEVERITY] [--exit-zero]
                       [--baseline FILE] [--write-baseline FILE] [--output FILE] [--jobs N]

`msplit check` tells whether the stream ids of a model are valid, whole, safe, and still worth it. It never runs the
model and never changes a file. What it can check depends on what it is given: the model alone, the rules that its ids
come from, a plan, or the model that the ids were made for. A check that has nothing to go by is skipped; `--verbose`
says why.

| exit code | meaning |
| --- | --- |
| 0 | nothing was found that fails the run, or `--exit-zero` was given |
| 1 | there is a finding of severity `error`, or of what `fail_on` (`--fail-on`) says |
| 2 | it could not be checked: wrong usage or settings, or a file that can not be read |

Warnings and infos are told and do not fail the run. `--fail-on warning` makes warnings fail it, and
`severity: {MS012: error}` makes one of them an error.

What the ids were made with (rules, streams, batch, shapes, GPU, profile) need not be said again: `msplit assign` has left
[a record](files.md#the-record-of-an-assignment) of it with the model. Options win over settings, and settings over the
record; `--costs record=no` leaves it out. A finding that depends on any of it says what it was judged with, and where that came from.

Several models may be given, or a folder of models: `msplit check models`. Several processes (`--jobs N`) check them, and a summary is
printed. One that can not be read is told on stderr, in JSON, JUnit and SARIF; the others are checked all the same, and the exit code is 2.
`--plan` and `--against` belong to one model. `--output FILE` writes the result to a file, whole or not at all, in any format.

To begin with a project that has findings, write them down with `--write-baseline known.json`, commit the file, and give
`--baseline known.json` (or `baseline:` in the settings): what it knows is counted and neither listed nor failing. A finding is
known if it is of the same code and model and about no node that it was not about then, or, where it names no nodes, if it says
the same but for numbers. Findings of the baseline that are none any more are counted, too.
[schemas/baseline.json](schemas/baseline.json) describes the file.

A graph without any ids is valid: it runs on one stream. MS020 says so, as an info.

In Python: `msplit.check(msplit.load("model.pb"), ruleset="rules.yaml").findings`.

## Codes are stable

A code never changes its meaning and is never used again for another one. A new release may add codes and word
findings differently; list codes in `select` if a new one must not fail your CI. Programs should read
`--format json`, which [schemas/check.json](schemas/check.json) describes, or SARIF.

## Formats

| format | for |
| --- | --- |
| `table` | people at a terminal |
| `md` | a comment on a pull request |
| `json` | programs; see [schemas/check.json](schemas/check.json) |
| `github` | annotations by GitHub Actions (`::error file=…`) |
| `junit` | test reports: a case per check, failed by findings that fail the run |
| `sarif` | code scanning, SARIF 2.1.0 |

[ci-example](ci-example/README.md) is a repository that gates its pull requests with it, and that runs the check as a `pre-commit` hook.
Its hook runs the msplit that is installed. This repository also defines the hook `msplit-check` for `pre-commit` itself to
install: name your copy of it as `repo:`, and the model in `args:`.

## Settings

The nearest `msplit.yaml`, or `pyproject.toml` with a table `[tool.msplit]`, from the current folder upward, or
`--config FILE`. Unknown keys are errors. Options on the command line win; paths are relative to the settings' file.

```yaml
select: [MS]                  # codes or beginnings of codes; default: all
ignore: [MS017]               # likewise; wins over select
severity: {MS012: error}      # error, warning or info, in place of the check's own
fail_on: error                # the exit code is 1 from this severity on
streams: 4                    # ids are 0..3; default: what the rules or the plan say
fork_streams: 4               # streams that the fork is started with (MS019)
hand_set: ["tower_a/.*"]      # nodes whose ids the model's own code sets (MS003): patterns of whole names
rules: rules.yaml             # as --rules
plan: plan.json               # as --plan
batch: 128                    # as --batch
gpu: h200                     # as --costs gpu=
shapes: {image: [1, 224, 224, 3]}   # as --shape
profile: profile.json         # as --costs profile=
baseline: known.json          # as --baseline
limits:
  min_gain: 1.05              # MS015
  max_imbalance: 2.0          # MS012
  max_cross_edges: 1000       # MS013; default: no limit
  max_cross_bytes: 100000000  # MS013; default: no limit
  max_cross_share: 0.5        # MS013
  max_unknown: 0.25           # MS016
```

The same in `pyproject.toml`:

```toml
[tool.msplit]
rules = "rules.yaml"
batch = 128
severity = { MS012 = "error" }

[tool.msplit.limits]
min_gain = 1.2
```
"""


def checks_md() -> str:
    """docs/checks.md."""
    rows = [
        f"| [{check.code}](#{check.code.lower()}-{check.name}) | {check.name} | {check.severity.value} | {check.title} |"
        for check in CHECKS.values()
    ]
    table = "\n".join(["## Codes", "", "| code | name | severity | finding |", "| --- | --- | --- | --- |", *rows])
    return "\n".join([INTRODUCTION, table, "", *(page(check) for check in CHECKS.values())])


def schemas() -> dict[str, str]:
    """docs/schemas/: the schemas that are in the package, by name of the file."""
    folder = files("msplit") / "data" / "schemas"
    return {entry.name: entry.read_text("utf-8") for entry in folder.iterdir() if entry.name.endswith(".json")}


def main() -> None:
    """Writes all of it."""
    (DOCS / "schemas").mkdir(exist_ok=True)
    (DOCS / "checks.md").write_text(checks_md(), "utf-8")
    for name, text in schemas().items():
        (DOCS / "schemas" / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
