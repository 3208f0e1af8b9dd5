"""References of reports: the entries of `references.bib`, citations in a text, and the sources that recipes name.

A citation is a mark as in Pandoc: "[@dunnett1955]", "[@clopper1934; @suissa1991]", "[@ich1998, section 3.3.2]".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

CITATION = re.compile(r" ?\[(@[\w.-]+(?:, [^\]]+|; ?@[\w.-]+)*)\]")
CONTAINERS = {"article": "journal", "book": "publisher", "misc": "howpublished"}
"""BibTeX's field for the journal, the publisher or the series, by kind of entry."""


@dataclass(frozen=True)
class Reference:
    """One entry of a bibliography.

    `container`: journal, series or publisher; `place`: volume and pages, as "50(272):1096-1121".
    """

    key: str
    kind: str
    """A key of `CONTAINERS`."""
    authors: str
    """Authors as BibTeX writes them: "Dunnett, Charles W. and Other, Name"; organizations in braces."""
    title: str
    year: str
    container: str = ""
    place: str = ""
    doi: str = ""
    eprint: str = ""
    """Number at arXiv."""

    @property
    def label(self) -> str:
        """Authors and year in short: "Dunnett 1955", "Clopper and Pearson 1934"; the title if they are not known."""
        if not self.authors:
            return f"{self.title} {self.year}".strip()
        if self.authors.startswith("{"):
            return f"{self.authors.strip('{}')} {self.year}".strip()
        names = [name.partition(",")[0].strip("{}") for name in self.authors.split(" and ")]
        several = len(names) > 2 or names[-1] == "others"
        return f"{names[0]} et al. {self.year}" if several else f"{' and '.join(names)} {self.year}"

    @property
    def text(self) -> str:
        """The entry as text for a list of references, with its arXiv number if it has one."""
        return f"{self.entry} arXiv:{self.eprint}." if self.eprint else self.entry

    @property
    def entry(self) -> str:
        """The entry as text without its DOI or arXiv number, which reports append as a link."""
        authors = self.authors.strip("{}")
        if not self.authors.startswith("{"):
            persons = [" ".join(reversed(name.strip("{}").split(", "))) for name in self.authors.split(" and ")]
            authors = ", ".join(persons[:-1]) + (" and " if persons[:-1] else "") + persons[-1]
        where = " ".join(filter(None, (self.container, self.place)))
        return ". ".join(filter(None, (authors, self.title, where, self.year))) + "."

    @property
    def number(self) -> str:
        """The DOI, or else the arXiv number; "" if neither is known."""
        return self.doi or (f"arXiv:{self.eprint}" if self.eprint else "")

    @property
    def url(self) -> str:
        """The URL of the DOI, or else at arXiv; "" if neither is known."""
        if self.doi:
            return f"https://doi.org/{self.doi}"
        return f"https://arxiv.org/abs/{self.eprint}" if self.eprint else ""


def read_bib(text: str) -> dict[str, Reference]:
    """Return the entries of a .bib file by key. Each field is on a separate line: `  name = {value},`."""
    found = {}
    for kind, key, body in re.findall(r"^@(\w+)\{([\w.-]+),\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        field = dict(re.findall(r"^  (\w+) = \{(.*)\},$", body, re.MULTILINE))
        number = f"({field['number']})" if "number" in field else ""
        pages = field.get("pages", "").replace("--", "-")
        place = f"{field['volume']}{number}:{pages}" if "volume" in field else field.get("note", "")
        found[key] = Reference(
            key, kind, field.get("author", ""), field["title"], field.get("year", ""),
            field.get(CONTAINERS[kind], ""), place, field.get("doi", ""), field.get("eprint", ""),
        )  # fmt: skip
    return found


KNOWN = read_bib((files(__package__) / "references.bib").read_text(encoding="utf-8"))
"""All known entries by key: the literature of the methods, and papers and programs that shipped recipes name."""
PAPERS = {entry.eprint: entry for entry in KNOWN.values() if entry.eprint}
"""The entries with an arXiv number, by that number."""
PROGRAMS = [entry for entry in KNOWN.values() if not entry.authors]
"""The entries of programs, in which recipes name a class or an option."""


def citations_in(mark: str) -> list[tuple[str, str]]:
    """Return the citations in a mark such as "[@a, section 3; @b]", as (key, place in the source)."""
    items = re.split(r"; ?@", mark.strip(" []").removeprefix("@"))
    return [(key, place) for key, _, place in (item.partition(", ") for item in items)]


def keys_in(text: str) -> list[str]:
    """Return the keys that `text` cites, in order."""
    return [key for found in CITATION.finditer(text) for key, _ in citations_in(found[0])]


ARXIV = re.compile(
    r"(?:arXiv[ :]*|(?:https?://)?(?:www\.)?arxiv\.org/(?:abs|pdf)/)(\d{4}\.\d{4,5})(?:v\d+)?(?:\.pdf)?", re.IGNORECASE
)
"""Pattern of an arXiv number, or of its URL."""
_PART = r"(?:sections?|sec\.|tables?|appendix|figures?|fig\.|equations?|eq\.|chapters?|pages?|p\.)"
BETWEEN = re.compile(
    rf"[ ,]*(?P<place>\([^)]*\)|{_PART} [\w.]*\w)?(?:[ ,&]|and\b)*(?P<names>.*)",
    re.IGNORECASE,
)
"""Pattern of the text between two arXiv numbers: the place in the first source, and the authors of the second."""
PLACE = re.compile(rf"{_PART} .*|\S*[=/_.]\S*[^\s.]", re.IGNORECASE)
"""Pattern of a place in a source that is not part of its title: a section, a file, an option."""
YEAR = re.compile(r"(?:, ?| ?\()((?:19|20)\d\d)\)?$")


def sources_of(text: str) -> dict[Reference, str]:
    """Return {source: place in it} from a text such as "Transformer Engine DelayedScaling; Smith et al., arXiv 1.2"."""
    found: dict[str, tuple[Reference, list[str]]] = {}
    for part in (" ".join(each.replace("[", "(").replace("]", ")").split()) for each in text.split(";")):
        for source, place in _sources(part) if part else ():
            _, places = found.setdefault(source.key, (source, []))
            if place and place not in places:
                places.append(place)
    return {source: ", ".join(places) for source, places in found.values()}


def _sources(part: str) -> list[tuple[Reference, str]]:
    """Return the sources that a part names, with where in each: one, or one for each number at arXiv."""
    numbers = list(ARXIV.finditer(part))
    if not numbers:
        return [_by_title(part)]
    names = part[: numbers[0].start()]
    found: list[tuple[Reference, str]] = []
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        source = _by_number(number[1], names.rstrip(" ,(:"))
        if following is None:
            return [*found, (source, part[number.end() :].strip(" ,()."))]
        between = BETWEEN.fullmatch(part[number.end() : following.start()].lstrip(")"))
        place, names = (between["place"] or "", between["names"]) if between else ("", "")
        found.append((source, place.strip("()")))
    return found


def _by_number(number: str, names: str) -> Reference:
    title, year = _dated(names)
    unknown = Reference(f"arxiv-{number}", "misc", "", title or "A preprint", year or f"20{number[:2]}", eprint=number)
    return PAPERS.get(number, unknown)


def _by_title(part: str) -> tuple[Reference, str]:
    for program in PROGRAMS:
        if part == program.title or part.startswith(f"{program.title} "):
            return program, part.removeprefix(program.title).strip()
    title, _, place = part.rpartition(", ")
    if not title or not PLACE.fullmatch(place):
        title, place = part, ""
    key = f"{re.sub(r'[^A-Za-z0-9]+', '-', title)[:32]}-{sha256(title.encode()).hexdigest()[:6]}"
    title, year = _dated(title)
    return Reference(key, "misc", "", title, year), place


def _dated(title: str) -> tuple[str, str]:
    """Split a title, or names, into (text without the year at its end, year); the year is "" if there is none."""
    year = YEAR.search(title)
    return (title[: year.start()], year[1]) if year else (title, "")


def citation_of(sources: Mapping[Reference, str]) -> str:
    """Return the mark that cites `sources` in a text."""
    cited = (f"@{source.key}{f', {place}' if place else ''}" for source, place in sources.items())
    return f"[{'; '.join(cited)}]"
