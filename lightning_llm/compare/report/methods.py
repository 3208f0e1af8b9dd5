"""The methods of a comparison: a paragraph on its runs, and the passages of the method that apply, with citations.

The one text of the report, of `compare.json`, of a paper and of the docs. Citations are marks as in Pandoc,
"[@dunnett1955]", of entries of `references.bib`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_llm.compare.format import short
from lightning_llm.compare.looks import looks_statement
from lightning_llm.compare.report.references import (
    CITATION,
    KNOWN,
    Reference,
    citation_of,
    citations_in,
    keys_in,
    sources_of,
)
from lightning_llm.compare.report.study import Study
from lightning_llm.compare.statistics.seeds import PLANNED_GAP, POWER
from lightning_llm.compare.statistics.stability import OUTLIER_FACTOR, STABILITY_MARGIN
from lightning_llm.compare.verdict_text import quantized_sentences


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


@dataclass(frozen=True)
class Passage:
    """A part of the method, with citations, and when it is part of what was done: in `words`, and by `applies`."""

    heading: str
    words: str
    applies: Callable[[Study], bool]
    text: str


def _always(_: Study) -> bool:
    return True


PASSAGES = (
    Passage(
        "Pairs", "always", _always,
        "Runs of the same seed share initial weights and the order of the data, so they are compared in pairs. A "
        "pair's difference is taken of the tail of the validation loss: the mean over the validations in the last part "
        "of the steps that all runs have. The gap is the mean difference over the seeds at which neither run failed.",
    ),
    Passage(
        "Records", "every run has them", lambda study: not study.unverified,
        "The losses are those that the runs wrote: the records, the configuration and the hashes of code and data of "
        "each run were verified by a hash chain and digests.",
    ),
    Passage(
        "Records", "a run has none, or went on from one without", lambda study: study.unverified,
        "The records of some runs carry no hash chain and were not verified.",
    ),
    Passage(
        "Intervals", "two recipes or more share a baseline", lambda study: study.comparisons > 1,
        "Intervals hold together for all recipes that share a baseline [@dunnett1955], with seeds as blocks; the "
        "multivariate t is integrated by quadrature [@genz2009].",
    ),
    Passage(
        "Intervals", "one recipe stands alone", lambda study: study.decided_by_interval and study.comparisons == 1,
        "The interval is Student's, of the paired differences over seeds.",
    ),
    Passage(
        "Intervals", "recipes share a variance", lambda study: study.pooled,
        "The variance is pooled over all recipes but those that are much louder than the others (F test at 1 % over "
        "their number), with degrees of freedom that allow for the baseline that they share [@satterthwaite1946]; so "
        "a loud recipe in the pool widens the others' intervals. No recipe's variance is taken to be below its own "
        "estimate, since a preliminary test would make intervals too short [@bancroft1944].",
    ),
    Passage(
        "Intervals", "a recipe's spread stands out", lambda study: study.unpooled,
        "A recipe outside the pool, or whose spread stands out of it (F test at 25 % [@bancroft1983]), is judged by "
        "its own variance and degrees of freedom [@hasler2008].",
    ),
    Passage(
        "Intervals", "recipes have different seeds", lambda study: study.comparisons > 1 and study.unlike_seeds,
        "Over seeds that not all recipes have, the smallest of their correlations is taken for all, which can only "
        "widen the intervals [@sidak1968].",
    ),
    Passage(
        "Intervals", "a recipe has one pair", lambda study: study.one_pair,
        "One pair shows no spread, and decides nothing.",
    ),
    Passage(
        "Verdicts", "always", _always,
        "By loss a recipe is lossless where the interval's upper bound is below the margin, which is non-inferiority "
        "[@ich1998, section 3.3.2], lossy where its lower bound is above it, and otherwise inconclusive. The verdict "
        "is lossy where the loss or the stability says so. It is lossless where the loss says so, no run is missing, "
        "and the recipe failed alone at no more seeds than the baseline did, or so few of so many that the rate is "
        f"shown to be below {100 * STABILITY_MARGIN:g} %.",
    ),
    Passage(
        "Verdicts", "a baseline has not learned",
        lambda study: any(verdict.judged.measured.unlearned for verdict in study.verdicts),
        "A baseline whose loss is not below the entropy of the tokens' frequencies (where that is not recorded, 0.9 "
        "ln(vocabulary)) has not learned, and gives no verdict.",
    ),
    Passage(
        "Verdicts", "each recipe is taken at its best value of a key, by seeds that do not judge",
        lambda study: study.selection is not None and not study.selection.by_all,
        "Each recipe was taken at its own best value of a key, chosen by the losses of seeds that were not judged: the "
        "best of several is low by luck, too.",
    ),
    Passage(
        "Verdicts", "each recipe is taken at its best value of a key", lambda study: study.selection is not None,
        "A recipe is lossy only if it is at every value of its own, and lossless only if it is against the baseline at "
        "every value: whichever is the best, the verdict holds there.",
    ),
    Passage(
        "Verdicts", "a search ended recipes early", lambda study: study.ended_by_search,
        "A search ended the others early by their losses at the same seeds: these seeds chose the recipes that are "
        "left, and judge them as well, so that the best of many may look better than it is. Seeds that chose nothing "
        "would tell.",
    ),
    Passage(
        "Verdicts", "looks were declared before the first run", lambda study: study.design is not None,
        "Looks that a sweep declared before its first run share out the error by a spending function [@lan1983], with "
        "boundaries drawn for this very procedure. Intervals then hold together over all looks, too "
        "[@jennison1989].",
    ),
    Passage(
        "Verdicts", "the margin is in tokens", lambda study: study.terms.token_margin is not None,
        "A margin of a share m of tokens is what the baseline loses with D / (1 + m) of them, read at each seed off "
        "its own runs at other numbers of tokens, each with its own decay. A recipe is within it where the mean over "
        "seeds of difference less margin is below zero: the interval has the margin's noise in it, and what it does "
        "not reject is Fieller's interval for the ratio of gap to slope [@fieller1954].",
    ),
    Passage(
        "Verdicts", "the runs were looked at more than once", lambda study: len(study.looks) > 1, looks_statement(),
    ),
    Passage(
        "Verdicts", "more seeds would decide a verdict",
        lambda study: any(verdict.plan.more is not None for verdict in study.verdicts),
        f"Seeds are planned for true gaps of 0 and of {PLANNED_GAP} margins, for a probability of {100 * POWER:g} % "
        "of the right verdict, averaged over what the true spread may be, given the one found [@ohagan2005]; the gap "
        "observed plays no part [@hoenig2001].",
    ),
    Passage(
        "All pairs", "every recipe is held against every other", lambda study: study.all_pairs,
        "Gaps between all recipes, the baseline among them, are paired by seed as well. Their intervals hold together "
        "over all pairs of levels of like spread by the studentized range [@tukey1953], with a variance of its own for "
        "a pair whose spread stands out [@dunnett1980]; verdicts are by their own intervals, and not by these.",
    ),
    Passage(
        "Failures", "no run failed", lambda study: not study.failed,
        "A run fails where it diverges or its pair is an outlier; none did. The failure rate that this allows is "
        "given by its exact upper bound [@clopper1934].",
    ),
    Passage(
        "Failures", "a run failed", lambda study: study.failed,
        "A run failed where it diverged, or where fewer than half of a recipe's pairs lie more than "
        f"{OUTLIER_FACTOR:g} times as far from zero as the margin, the A/A floor, the recipe's other pairs and the "
        "median of the other recipes' pairs. Failure rates have exact intervals [@clopper1934]. A recipe is unstable "
        "where it failed and the baseline did not at more seeds than the other way round, by McNemar's test "
        "[@mcnemar1947], exact and unconditional [@suissa1991], one-sided, shared out over the recipes (Bonferroni).",
    ),
    Passage(
        "Noise", "an A/A floor was measured", lambda study: any(verdict.floor.pairs for verdict in study.verdicts),
        "The A/A floor is the root mean square difference between runs of one recipe and seed that differ in the order "
        "of sums alone (another micro-batch size, thread count or reduction).",
    ),
    Passage(
        "Noise", "curves are shown", lambda study: any(verdict.sound_pairs for verdict in study.verdicts),
        "The bands of a curve of differences are intervals of the same kind at each step: they hold together over "
        "recipes, and not over steps. So do those of the sources of the text, and not over sources.",
    ),
    Passage(
        "Noise", "looks were declared and curves are shown",
        lambda study: study.design is not None and any(verdict.sound_pairs for verdict in study.verdicts),
        "Bands, and the intervals of sources, are at the confidence of the look that the recipe was judged at, over "
        "the seeds that it had by then; the tests for failures and spikes have that look's share of the error. "
        "Intervals of rates of failures and spikes are those of one look.",
    ),
    Passage(
        "Noise", "a run had a spike", lambda study: any(sum(verdict.spikes.total) for verdict in study.verdicts),
        "Spikes are judged by the seeds at which one of the two runs spiked at all (McNemar's test, as for failures), "
        "and by the signs of the differences of their numbers [@fisher1935, section 21], each with half of the error.",
    ),
    Passage(
        "Branches", "the runs are branches", lambda study: any(verdict.switch for verdict in study.verdicts),
        "Branches off one checkpoint of a trunk are compared over their own steps, and what is found holds for a "
        "recipe that is switched on there. Replicates are trunks of several seeds; seeds after one trunk speak of what "
        "follows it alone, and several such trunks are judged apart: as replicates they would be pseudoreplicates "
        "[@hurlbert1984].",
    ),
    Passage(
        "Cost", "tokens to loss were measured",
        lambda study: any(verdict.cost.timed_pairs for verdict in study.verdicts),
        "Tokens to loss is the ratio of the tokens that recipe and baseline took to the lowest loss that both reached; "
        "the ratio of the training seconds is recorded beside it.",
    ),
    Passage(
        "Cost", "a target was given", lambda study: any(verdict.time_to_target for verdict in study.verdicts),
        "Time to a target is that of the first validation at it, nothing interpolated. A pair of which one never "
        "arrives bounds its ratio from below or from above; the median over pairs lies between the medians of these "
        "bounds, and that of the times themselves is the product-limit estimate where all are watched equally long "
        "[@kaplan1958]. Its interval is by the order of the pairs [@thompson1936], its test a sign test.",
    ),
    Passage(
        "Cost", "the baseline was run at other numbers of tokens",
        lambda study: any(verdict.effective_data for verdict in study.verdicts),
        "What a gap is in tokens is read off the baseline's own losses at other numbers of tokens, between which they "
        "follow E + B D^-beta. The interval is every ratio that a t test over seeds of recipe less baseline does not "
        "reject: near 1 Fieller's [@fieller1954].",
    ),
    Passage(
        "Ladder", "a law over sizes and tokens was fitted", lambda study: study.ladder,
        "The baseline's losses over N parameters and D tokens are fitted by L = E + A N^-alpha + B D^-beta "
        "[@hoffmann2022] with a weak prior on the exponents [@besiroglu2024], a recipe's gaps by c_D B D^-beta + c_N A "
        "N^-alpha + c_O D / N: tokens, and parameters [@kumar2024], that count for less, and what grows with tokens "
        "per parameter. Intervals are by a wild bootstrap over runs [@wu1986] of residuals over one less their "
        "leverage [@mackinnon1985], with degrees of freedom by Satterthwaite [@satterthwaite1946]; they hold one by "
        "one. Nothing is predicted where the law misses by more than seeds scatter (F test for lack of fit "
        "[@fisher1922]) or gaps do (the same with each size's own variance [@brown1974]), where the smaller sizes do "
        "not predict the largest (its variance moderated by theirs [@smyth2004]), or further than is said.",
    ),
)  # fmt: skip
"""In the order of the report; passages of one heading stand together, and make a paragraph."""


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
