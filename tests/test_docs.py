"""The documentation names every module, and its links lead somewhere."""

import os
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_architecture_names_every_module():
    source = ROOT / "src" / "alula"
    modules = {str(path.relative_to(source)) for path in source.rglob("*.py") if path.read_text().strip()}
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert modules == set(re.findall(r"^- `([\w/]+\.py)`: ", page, re.MULTILINE))
    assert set(re.findall(r"`([a-z_]+/[\w/]+\.py)`", page)) <= modules


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not path or target == Path(os.path.normpath(page.resolve().parent / path)), (
                "GitHub follows no symlink"
            )
            assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_site_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    generated = {"index.md", "quickstart.md"}  # from README.md and the notebook
    assert set(listed) - generated == {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert len(listed) == len(set(listed))


@cache
def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
