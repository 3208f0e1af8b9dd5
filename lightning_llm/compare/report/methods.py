"""The methods of one comparison: a paragraph on its runs, and the passages that hold for what was done in it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_llm.compare.report.passages import PASSAGES
from lightning_llm.compare.report.recipe_sources import citation_of, sources_of
from lightning_llm.compare.report.references import CITATION, KNOWN, Reference, citations_in, keys_in
from lightning_llm.compare.report.study import Study
from lightning_llm.compare.wording import quantized_sentences, short


@dataclass(frozen=True)
class Methods:
    """The methods of one comparison: `paragraphs` of (heading, text with citations), and the entries they cite."""

    paragraphs: tuple[tuple[str, str], ...]
    references: tuple[Reference, ...]

    @property
    def texts(self) -> list[str]:
        """The paragraphs as plain text, with authors and years for citations."""
        return [f"{heading}. {plain(text, self.references)}" for heading, text in self.paragraphs]


def methods_of(study: Study) -> Methods:
    """Return what was done, in order of the passages, and what is cited, in order of first citation."""
    recipes = {name: sources_of(words) for name, words in study.recipe_sources.items()}
    paragraphs = {"Runs": runs_paragraph(study, {name: citation_of(found) for name, found in recipes.items()})}
    for passage in PASSAGES:
        if passage.applies(study):
            paragraphs[passage.heading] = f"{paragraphs.get(passage.heading, '')} {passage.text}".strip()
    known = KNOWN | {source.key: source for found in recipes.values() for source in found}
    cited = dict.fromkeys(key for text in paragraphs.values() for key in keys_in(text))
    return Methods(tuple(paragraphs.items()), tuple(known[key] for key in cited))


def plain(text: str, references: Sequence[Reference]) -> str:
    """Return `text` with "(Dunnett 1955)" for each citation."""
    labels = {reference.key: reference.label for reference in references}

    def words(found: re.Match[str]) -> str:
        cited = (f"{labels[key]}{f', {place}' if place else ''}" for key, place in citations_in(found[0]))
        return f" ({'; '.join(cited)})"

    return CITATION.sub(words, text)


def runs_paragraph(study: Study, citations: dict[str, str]) -> str:
    """Return what was run, on what, with what: model, data, seeds, precision, versions, hardware.

    `citations`: {precision recipe: the mark that cites what it is taken from}.
    """
    cited = {name: f"{name} {mark}" for name, mark in citations.items()}
    baseline = study.factor.baseline_label
    held = listed([cited.get(name, name) for name in study.recipes])
    terms, (fewest, most) = study.terms, study.pairs
    pairs = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    sentences = [
        f"{held} {'was' if len(study.recipes) == 1 else 'were'} held against {cited.get(baseline, baseline)} "
        f"({study.factor.name}) in {pairs} pair{'s' * (most > 1)} of runs each, of seed{'s' * (len(study.seeds) > 1)} "
        f"{spans(study.seeds)}"
        + (f", in each of {len(study.settings)} settings ({'; '.join(study.settings)})" if study.settings else "")
        + f": {len(study.runs)} runs.",
        _trained(study),
        f"The margin is {terms.margin_and_unit}"
        + (f" of {terms.metric}" if "nats" in terms.margin_and_unit else "")
        + f", the confidence {100 * terms.confidence:g} %, the tail the last {100 * terms.tail_share:g} % of the steps "
        f"({_range(study.tail_validations)} validation{'s' * (study.tail_validations[1] != 1)}).",
        *quantized_sentences(study.verdicts),
        _precision(study),
        _machines(study),
    ]
    if selection := study.selection:
        seeds = f"seed{'s' * (len(selection.seeds) > 1)} {spans(list(selection.seeds))}"
        sentences.append(f"{selection.key} was chosen for each recipe at {seeds}.")
    if len(study.looks) > 1:
        sentences.append(f"The runs were looked at {len(study.looks)} times.")
    return " ".join(filter(None, sentences))


def _trained(study: Study) -> str:
    sizes = listed([short(each) for each in study.parameters])
    models = listed(study.models) or "one"
    data = listed([str(each) for each in study.values("data.name")])
    tokens = listed([short(each) for each in study.tokens])
    batch = _sizes(study, "data.global_batch_size", "sequences a step")
    length = _sizes(study, "data.sequence_length", "tokens a sequence")
    optimizer = listed([str(each) for each in study.values("optim.name")])
    rate = _sizes(study, "optim.learning_rate", "")
    schedule = listed([str(each) for each in study.values("schedule.name")])
    layers, width = _sizes(study, "model.num_layers", "layers"), _sizes(study, "model.hidden_size", "wide")
    about = ", ".join(filter(None, (f"{sizes or 'an unknown number of'} parameters", layers, width)))
    text = f"The model is {models} ({about}), trained on {tokens or 'the'} tokens"
    text += f" of the data {data}" if data else ""
    details = [
        length, batch, f"optimizer {optimizer}" if optimizer else "",
        f"peak learning rate {rate}" if rate else "", f"schedule {schedule}" if schedule else "",
    ]  # fmt: skip
    return f"{text} ({', '.join(filter(None, details))})."


def _precision(study: Study) -> str:
    sentences = []
    if study.native:
        sentences.append(f"{listed(study.native)} ran natively.")
    if study.emulated:
        sentences.append(
            f"{listed(study.emulated)} ran emulated: with the format's numbers, and a speed that says nothing of it."
        )
    return " ".join(sentences)


def _machines(study: Study) -> str:
    packages = {"lightning_llm": "lightning-llm", "torch": "PyTorch [@pytorch2024]",
                "lightning": "PyTorch Lightning [@lightning2019]", "transformer_engine": "Transformer Engine",
                "python": "Python"}  # fmt: skip
    versions = []
    for package, name in packages.items():
        if found := study.recorded(f"versions.{package}"):
            commit = f" (commit {listed(study.commits)})" if package == "lightning_llm" and study.commits else ""
            versions.append(f"{name} {listed(found)}{commit}")
    hardware = f" on {listed(study.devices)}" if study.devices else ""
    return f"Software: {', '.join(versions)}{hardware}." if versions else ""


def _sizes(study: Study, key: str, unit: str) -> str:
    found = study.values(key)
    words = [f"{each:g}" if isinstance(each, int | float) else str(each) for each in found]
    return f"{listed(words)} {unit}".strip() if found else ""


def _range(span: tuple[int, int]) -> str:
    return f"{span[0]}" if span[0] == span[1] else f"{span[0]} to {span[1]}"


def listed(words: Sequence[str]) -> str:
    """Return "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers with runs of three or more in short: "0 to 4, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    words = [f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]
    return ", ".join(words)
