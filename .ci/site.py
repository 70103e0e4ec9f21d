"""Hooks of mkdocs: pages from README.md and the notebook, and links from docs/ to other files of the repository."""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SOURCES = {"index.md": "README.md", "quickstart.md": "examples/quickstart.ipynb"}
"""Pages that are made from files outside docs/."""
PAGES = {source: page for page, source in SOURCES.items()}
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in SOURCES.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=notebook(text) if source.endswith(".ipynb") else text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Resolve links from where the page's source lies: into docs/ as links of the site, others to the repository."""
    uri = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(uri, f"docs/{uri}"))
    repository = f"{config.repo_url}/blob/main/"

    def resolve(link: re.Match[str]) -> str:
        target, anchor = link[1].removeprefix(repository), link[2] or ""
        if "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join("" if target != link[1] else folder, target))
        if path in PAGES:
            return f"]({posixpath.relpath(PAGES[path], posixpath.dirname(uri) or '.')}{anchor})"
        if path.startswith("docs/"):
            return f"]({posixpath.relpath(path[5:], posixpath.dirname(uri) or '.')}{anchor})"
        if not (ROOT / path).exists():
            raise PluginError(f"{uri}: the link {target} leads nowhere")
        return f"]({repository}{path}{anchor})"

    return LINK.sub(resolve, markdown)


def notebook(text: str) -> str:
    """A notebook as Markdown: its text, code, printed lines and pictures."""
    parts: list[str] = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [output(one) for one in cell.get("outputs", [])]
    return "\n\n".join(parts)


def output(one: dict[str, Any]) -> str:
    if picture := one.get("data", {}).get("image/png"):
        return f'<img alt="output of the cell" src="data:image/png;base64,{"".join(picture).strip()}">'
    return f"```text\n{''.join(one.get('text', []))}\n```"
