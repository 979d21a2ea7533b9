"""Puts everything into one file, safely: names in a model are not to be trusted.

Text goes through `escape.html`. The graph goes in as base64 of gzip, in which no name can end anything. Scripts run only if their hash is
in the page's Content-Security-Policy, which also forbids every request.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

_PACKAGE = "msplit.report.html"
VENDOR = ("cytoscape.min.js", "cytoscape-dagre.min.js")
SCRIPTS = ("data.js", "look.js", "rows.js", "graph.js", "timeline.js", "panel.js", "main.js")
LICENCES = ("LICENSE.cytoscape", "LICENSE.cytoscape-dagre", "LICENSE.dagre")

_PLACE = re.compile(r"\{\{(\w+)\}\}")
_SOURCE_MAP = re.compile(r"^//# sourceMappingURL=.*$", re.MULTILINE)


def asset(folder: str, name: str) -> str:
    """A file that ships with this package."""
    return resources.files(_PACKAGE).joinpath(folder, name).read_text("utf-8")


def packed(data: Mapping[str, Any]) -> str:
    """Data for the page's script: JSON, compressed, in base64. Equal data give equal text."""
    plain = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(plain.encode("utf-8"), 6, mtime=0)).decode("ascii")


def page(parts: Mapping[str, str], data: Mapping[str, Any]) -> str:
    """The whole file, all of which has a UTF-8 form: `parts` are HTML for the places of ``page.html`` that are not filled here."""
    app = "\n".join(["(() => {", '"use strict";', *(asset("assets", name) for name in SCRIPTS), "})();"])
    scripts = [*(_SOURCE_MAP.sub("", asset("vendor", name)) for name in VENDOR), app]
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    places = {
        **parts,
        "style": asset("assets", "style.css"),
        "policy": (
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
            "connect-src 'none'; base-uri 'none'; form-action 'none'"
        ),
        "licences": "\n".join(asset("vendor", name) for name in LICENCES).replace("--", "- -"),
        "data": packed(data),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    # One pass, so that a name that looks like a place is not filled.
    return _PLACE.sub(lambda found: places[found[1]], asset("assets", "page.html"))


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
