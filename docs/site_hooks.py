"""Hooks of MkDocs: add the files outside docs/ that the site serves, and adapt links to them."""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Served files outside docs/, by their path on the site.
SERVED = {
    "index.md": "README.md",
    "results/index.md": "RESULTS.md",
    **{f"{name.lower()}.md": f"{name}.md" for name in ("CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY")},
    **{file.relative_to(ROOT).as_posix(): file for file in ROOT.glob("experiments/**/*.png")},
}


def on_files(files, config):
    for uri, path in SERVED.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Points links to the places of their targets on the site. Replaces other links to files by their text."""

    def adapt(link):
        text, name, anchor = link.groups()
        target, file = _find(name, page, files)
        if file:
            return f"[{text}]({os.path.relpath(file.src_uri, os.path.dirname(page.file.src_uri))}{anchor})"
        # MkDocs reports links to files that do not exist.
        return text if target.exists() else link[0]

    return re.sub(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*|)\)", adapt, markdown)


def on_page_content(html, page, config, files):
    """Adapts the links of notebooks, which are not Markdown pages."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def adapt(link):
        file = _find(link[1], page, files)[1]
        return f'href="{file.url_relative_to(page.file)}"' if file else link[0]

    return re.sub(r'href="([^"#:]+)"', adapt, html)


def _find(name, page, files):
    """Returns the target of a link as a path, and as a file of the site (None: the site does not contain it)."""
    target = (Path(page.file.abs_src_path).parent / name).resolve()
    served = (file for file in files if file.inclusion.is_included() and file.abs_src_path == str(target))
    return target, next(served, None)
