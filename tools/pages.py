"""Makes a site of the pages of the checkout: the hooks of MkDocs that `mkdocs.yml` names.

The pages are written to be read on GitHub and its like: links lead from file to file, also out of `docs/`. So the site has the folders of
the checkout. It holds every page, and every file that a page links to; a link to a folder leads to a list of its files. A link that leads
nowhere fails `mkdocs build --strict`, which `.ci/docs` runs.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/**/*.md", "deploy/*.md", "sample_graphs/*.md", "benchmarks/**/*.md")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)\s#]+)")
REFERENCE = "docs/reference.md"
ENTRY = re.compile(
    r"(^### `[\w.]*\b(\w+)`\n\n(?: {4}[^\n]*\n\n)?)[^#]*?\[Source\]\(\.\./([\w/]+)\.py\).*?(?=^##|\Z)",
    re.MULTILINE | re.DOTALL,
)
"""What the reference says of one name, with its heading, and the file that has it."""


def linked(page: Path) -> set[Path]:
    """The files and folders that a page links to, as far as they are there."""
    targets = LINK.findall(FENCE.sub("", page.read_text("utf-8")))
    return {path for target in targets if (path := (page.parent / target).resolve()).exists()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the pages of the whole checkout in the place of those of `docs/`."""
    pages = {path for pattern in PAGES for path in ROOT.glob(pattern)}
    others = {path for page in pages for path in linked(page)} - pages
    folders = {path for path in others if path.is_dir()}
    listed = {path for folder in folders for path in folder.iterdir() if path.is_file()}
    found = [
        File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
        for path in sorted(pages | listed | others - folders)
    ]
    for folder in sorted(folders):
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
        text = "\n".join([f"# {folder.name}", "", *(f"- [{name}]({name})" for name in names)])
        found.append(File.generated(config, f"{folder.relative_to(ROOT).as_posix()}/index.md", content=text))
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *found])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change what GitHub takes and Python-Markdown does not: words behind a fence's language, and links to folders.

    In the reference the whole docstring takes the place of its first sentence.
    """
    if page.file.src_uri == REFERENCE:
        entries = markdown.count("\n### ")
        markdown, found = ENTRY.subn(
            lambda entry: f"{entry[1]}::: {entry[3].replace('/', '.').removesuffix('.__init__')}.{entry[2]}\n\n",
            markdown,
        )
        if found != entries:
            raise PluginError(
                f"{REFERENCE} has {entries} entries, and {found} have the form that scripts/make_reference.py writes"
            )
    markdown = re.sub(r"^```(\w+) .*$", r"```\1", markdown, flags=re.MULTILINE)
    here = (ROOT / page.file.src_uri).parent
    return LINK.sub(
        lambda match: f"{match[1].rstrip('/')}/index.md" if (here / match[1]).is_dir() else match[1], markdown
    )
