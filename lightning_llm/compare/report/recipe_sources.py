"""What precision recipes are taken from, as their files say in words (`precision.reference`): entries, each once."""

import re
from collections.abc import Mapping
from hashlib import sha256

from lightning_llm.compare.report.references import KNOWN, Reference

ARXIV = re.compile(
    r"(?:arXiv[ :]*|(?:https?://)?(?:www\.)?arxiv\.org/(?:abs|pdf)/)(\d{4}\.\d{4,5})(?:v\d+)?(?:\.pdf)?", re.IGNORECASE
)
"""A number at arXiv, or its address there."""
_PART = r"(?:sections?|sec\.|tables?|appendix|figures?|fig\.|equations?|eq\.|chapters?|pages?|p\.)"
BETWEEN = re.compile(
    rf"[ ,]*(?P<place>\([^)]*\)|{_PART} [\w.]*\w)?(?:[ ,&]|and\b)*(?P<names>.*)",
    re.IGNORECASE,
)
"""Of two numbers: where in the first, and whose the second is."""
PLACE = re.compile(rf"{_PART} .*|\S*[=/_.]\S*[^\s.]", re.IGNORECASE)
"""What is a place in a source, and none of its title: a section, a file, an option."""
YEAR = re.compile(r"(?:, ?| ?\()((?:19|20)\d\d)\)?$")
PAPERS = {
    paper.eprint: paper
    for paper in (
        *(known for known in KNOWN.values() if known.eprint),
        Reference("micikevicius2017", "misc", "Micikevicius, Paulius and others", "Mixed precision training", "2017",
                  eprint="1710.03740"),
        Reference("kalamkar2019", "misc", "Kalamkar, Dhiraj and others",
                  "A study of BFLOAT16 for deep learning training", "2019", eprint="1905.12322"),
        Reference("micikevicius2022", "misc", "Micikevicius, Paulius and others", "FP8 formats for deep learning",
                  "2022", eprint="2209.05433"),
        Reference("deepseek2024", "misc", "{DeepSeek-AI}", "DeepSeek-V3 technical report", "2024",
                  eprint="2412.19437"),
        Reference("tseng2025", "misc", "Tseng, Albert and Yu, Tao and Park, Youngsuk", "Training LLMs with MXFP4",
                  "2025", eprint="2502.20586"),
        Reference("castro2025", "misc", "Castro, Roberto L. and others",
                  "Quartet: Native FP4 training can be optimal for large language models", "2025",
                  eprint="2505.14669"),
        Reference("mishra2025", "misc", "Mishra, Asit and others", "Recipes for pre-training LLMs with MXFP8", "2025",
                  eprint="2506.08027"),
        Reference("nvidia2025", "misc", "{NVIDIA}", "Pretraining large language models with NVFP4", "2025",
                  eprint="2509.25149"),
    )
}  # fmt: skip
"""By arXiv number: those that shipped recipes name, and those that methods do."""
PROGRAMS = (
    Reference("transformer-engine", "misc", "", "Transformer Engine", "",
              "NVIDIA, https://github.com/NVIDIA/TransformerEngine"),
)  # fmt: skip
"""Of which recipes name a class or an option."""


def sources_of(words: str) -> dict[Reference, str]:
    """Return {source: where in it} of `words` such as "Transformer Engine DelayedScaling; Smith et al., arXiv 1.2"."""
    found: dict[str, tuple[Reference, list[str]]] = {}
    for part in (" ".join(each.replace("[", "(").replace("]", ")").split()) for each in words.split(";")):
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
    """Return a title, or names, without the year at its end, and that."""
    year = YEAR.search(title)
    return (title[: year.start()], year[1]) if year else (title, "")


def citation_of(sources: Mapping[Reference, str]) -> str:
    """Return the mark that cites `sources` in a text."""
    cited = (f"@{source.key}{f', {place}' if place else ''}" for source, place in sources.items())
    return f"[{'; '.join(cited)}]"
