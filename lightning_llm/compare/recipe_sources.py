"""What precision recipes are taken from, as their files say in words (`precision.reference`): entries, each once."""

import re
from collections.abc import Mapping
from hashlib import sha256

from lightning_llm.compare.references import Reference

ARXIV = re.compile(r"arXiv[ :]?(\d{4}\.\d{4,5})(?:v\d+)?")
PAPERS = {
    paper.eprint: paper
    for paper in (
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
"""By arXiv number: those that shipped recipes name."""
PROGRAMS = (
    Reference("transformer-engine", "misc", "", "Transformer Engine", "",
              "NVIDIA, https://github.com/NVIDIA/TransformerEngine"),
)  # fmt: skip
"""Of which recipes name a class or an option."""


def sources_of(words: str) -> dict[Reference, str]:
    """Return {source: where in it} of `words` such as "Transformer Engine DelayedScaling; Smith et al., arXiv 1.2"."""
    found: dict[Reference, str] = {}
    for part in (" ".join(each.replace("[", "(").replace("]", ")").split()) for each in words.split(";")):
        if part:
            source, place = _source(part)
            found[source] = ", ".join(filter(None, (found.get(source), place)))
    return found


def _source(part: str) -> tuple[Reference, str]:
    if found := ARXIV.search(part):
        before, after = part[: found.start()].rstrip(" ,("), part[found.end() :].strip(" ,().")
        number = found[1]
        unknown = Reference(f"arxiv-{number}", "misc", "", before or "A preprint", f"20{number[:2]}", eprint=number)
        return PAPERS.get(number, unknown), after
    for program in PROGRAMS:
        if part == program.title or part.startswith(f"{program.title} "):
            return program, part.removeprefix(program.title).strip()
    title, _, place = part.partition(", ")
    key = f"{re.sub(r'[^A-Za-z0-9]+', '-', title)[:32]}-{sha256(title.encode()).hexdigest()[:6]}"
    return Reference(key, "misc", "", title, ""), place


def citation_of(sources: Mapping[Reference, str]) -> str:
    """Return the mark that cites `sources` in a text."""
    cited = (f"@{source.key}{f', {place}' if place else ''}" for source, place in sources.items())
    return f"[{'; '.join(cited)}]"
