"""Puts everything into one file, safely: names in a model are not to be trusted.

Text goes through `escape.html`. Data go in as base64 of gzip, in which no name can end anything. Scripts run only if their hash is
in the page's Content-Security-Policy, which also forbids every request.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from msplit._version import __version__
from msplit.escape import html as text

_PACKAGE = "msplit.report.html"
_PLACE = re.compile(r"\{\{(\w+)\}\}")
_SOURCE_MAP = re.compile(r"^//# sourceMappingURL=.*$", re.MULTILINE)


@dataclass(frozen=True)
class Kit:
    """The files that a kind of page is made of.

    Attributes:
        body: Its HTML, with places to fill, in ``assets``.
        scripts: Its own scripts there.
        vendor: Libraries in ``vendor``, which run before them.
        licences: Their licences, there too.
        credits: Names and licences of the libraries, as the page shows them.
    """

    body: str
    scripts: tuple[str, ...]
    vendor: tuple[str, ...]
    licences: tuple[str, ...]
    credits: str


REPORT = Kit(
    "report.html",
    ("look.js", "data.js", "rows.js", "minimap.js", "graph.js", "timeline.js", "panel.js", "main.js"),
    ("cytoscape.min.js", "cytoscape-dagre.min.js"),
    ("LICENSE.cytoscape", "LICENSE.cytoscape-dagre", "LICENSE.dagre"),
    "Cytoscape.js and dagre (MIT licence)",
)
PLOTS = Kit(
    "plots.html",
    ("look.js", "plots.js"),
    ("d3.min.js", "plot.umd.min.js"),
    ("LICENSE.d3", "LICENSE.plot"),
    "Observable Plot and D3 (ISC licence)",
)


def asset(folder: str, name: str) -> str:
    """A file that ships with this package."""
    return resources.files(_PACKAGE).joinpath(folder, name).read_text("utf-8")


def packed(data: Mapping[str, Any]) -> str:
    """Data for the page's script: JSON, compressed, in base64. Equal data give equal text."""
    plain = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(plain.encode("utf-8"), 6, mtime=0)).decode("ascii")


def page(kit: Kit, title: str, parts: Mapping[str, str], data: Mapping[str, Any]) -> str:
    """The whole file, all of which has a UTF-8 form: `parts` are HTML for the places of the kit's body beside its title."""
    app = "\n".join(["(() => {", '"use strict";', *(asset("assets", name) for name in kit.scripts), "})();"])
    scripts = [*(_SOURCE_MAP.sub("", asset("vendor", name)) for name in kit.vendor), app]
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    places = {
        "title": text(title),
        "version": text(__version__),
        "body": _filled(kit.body, {"title": text(title), **parts}),
        "style": asset("assets", "style.css"),
        "policy": (
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
            "connect-src 'none'; base-uri 'none'; form-action 'none'"
        ),
        "credits": kit.credits,
        "licences": "\n".join(asset("vendor", name) for name in kit.licences).replace("--", "- -"),
        "data": packed(data),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    return _filled("frame.html", places)


def _filled(name: str, places: Mapping[str, str]) -> str:
    """An asset with its places filled: in one pass, so that a name that looks like a place is not."""
    return _PLACE.sub(lambda found: places[found[1]], asset("assets", name))


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
