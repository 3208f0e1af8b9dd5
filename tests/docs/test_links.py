"""Links and anchors of the pages exist, and every page of docs/ is in a table of contents. No Sphinx needed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *ROOT.glob("*.md"),
    *DOCS.rglob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
    *(ROOT / "examples").glob("*.md"),
]
FENCE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n.*?^\1`*[ \t]*$", re.DOTALL | re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[tuple[str, str]]:
    """Return (path, anchor) of every relative link and picture of a page, code left out."""
    text = re.sub(r"`[^`\n]*`", "`code`", FENCE.sub("", page.read_text(encoding="utf-8")))
    targets = [*re.findall(r"\]\(<?([^)\s>]+)>?\)", text), *re.findall(r"^\[[^\]]+\]: (\S+)", text, re.MULTILINE)]
    return [(path, anchor) for path, _, anchor in (each.partition("#") for each in targets) if ":" not in path]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and MyST give a page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+?)\s*$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        repeated = sum(each == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", each) is not None for each in found)
        found.add(f"{slug}-{repeated}" if repeated else slug)
    return found


def contents(page: Path) -> set[Path]:
    """Return the pages that a page's toctrees list, patterns expanded."""
    found: set[Path] = set()
    for block in TOCTREE.findall(page.read_text(encoding="utf-8")):
        for entry in (line.strip() for line in block.splitlines()):
            if entry and not entry.startswith(":"):
                matches = set(page.parent.glob(f"{entry.removesuffix('.md')}.md")) - {page}
                assert matches or "*" in entry, f"{page}: toctree entry {entry} matches no page"
                found |= matches
    return found


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_and_anchors_exist(page):
    broken = []
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}")
    assert broken == []


def test_every_page_is_in_a_table_of_contents():
    reached, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += contents(page)
    assert sorted(name(page) for page in set(DOCS.rglob("*.md")) - reached) == []


def test_every_page_has_one_title():
    titles = {name(page): FENCE.sub("", page.read_text(encoding="utf-8")) for page in DOCS.rglob("*.md")}
    assert [each for each, text in titles.items() if len(re.findall(r"^# ", text, re.MULTILINE)) != 1] == []


@pytest.mark.parametrize("index", sorted(DOCS.glob("*/index.md")), ids=name)
def test_every_page_is_linked_from_the_index_of_its_section(index):
    """Repository browsers show no toctree."""
    linked = {(index.parent / path).resolve() for path, _ in links(index)}
    assert sorted(name(page) for page in set(index.parent.glob("*.md")) - linked - {index}) == []


def test_pages_that_code_and_changelog_name_exist():
    folders = ("lightning_llm", "callbacks", "conf", "recipes", "tests", "benchmarks", "gpu_check", "docs")
    files = [ROOT / "CHANGELOG.md", *(file for folder in folders for file in (ROOT / folder).rglob("*"))]
    gone = {}
    for file in files:
        if file.suffix in {".py", ".yaml", ".md"}:
            text = file.read_text(encoding="utf-8")
            named = re.findall(r"(?<![\w/.])docs/(?!test_)[\w/]+\.(?:md|py|ipynb|svg)", text)
            if missing := {each for each in named if not (ROOT / each).exists()}:
                gone[name(file)] = missing
    assert gone == {}
