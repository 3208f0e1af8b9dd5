"""The methods section of a report: a paragraph on the runs, and those on the parts of the method that were used."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_llm.compare.format import short
from lightning_llm.compare.recorded_looks import looks_statement
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
    """The methods section of one comparison: `paragraphs`, (heading, text with citations), and cited `references`."""

    paragraphs: tuple[tuple[str, str], ...]
    references: tuple[Reference, ...]

    @property
    def texts(self) -> list[str]:
        """The paragraphs as plain text, with "(Dunnett 1955)" for citations."""
        return [f"{heading}. {plain(text, self.references)}" for heading, text in self.paragraphs]


def methods_of(study: Study) -> Methods:
    """Return the methods section of a comparison with these facts; references are in order of first citation."""
    recipes = {name: sources_of(text) for name, text in study.recipe_sources.items()}
    paragraphs = {"Runs": runs_paragraph(study, {name: citation_of(found) for name, found in recipes.items()})}
    for passage in PASSAGES:
        if passage.applies(study):
            paragraphs[passage.heading] = f"{paragraphs.get(passage.heading, '')} {passage.text}".strip()
    known = KNOWN | {source.key: source for found in recipes.values() for source in found}
    cited = dict.fromkeys(key for text in paragraphs.values() for key in keys_in(text))
    return Methods(tuple(paragraphs.items()), tuple(known[key] for key in cited))


def plain(text: str, references: Sequence[Reference]) -> str:
    """Return `text` with "(Dunnett 1955)" in place of each citation mark."""
    labels = {reference.key: reference.label for reference in references}

    def cited(found: re.Match[str]) -> str:
        cited = (f"{labels[key]}{f', {place}' if place else ''}" for key, place in citations_in(found[0]))
        return f" ({'; '.join(cited)})"

    return CITATION.sub(cited, text)


def runs_paragraph(study: Study, citations: dict[str, str]) -> str:
    """Return the paragraph that describes the runs: model, data, seeds, precision, versions, hardware.

    `citations`: {precision recipe: citation mark of its sources}.
    """
    cited = {name: f"{name} {mark}" for name, mark in citations.items()}
    baseline = study.factor.baseline_label
    compared = listed([cited.get(name, name) for name in study.recipes])
    terms, (fewest, most) = study.terms, study.pairs
    pairs = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    sentences = [
        f"{compared} {'was' if len(study.recipes) == 1 else 'were'} compared with {cited.get(baseline, baseline)} "
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
    """A passage of the methods section, included if `applies(study)`; `condition` describes this in docs."""

    heading: str
    condition: str
    applies: Callable[[Study], bool]
    text: str


def _always(_: Study) -> bool:
    return True


PASSAGES = (
    Passage(
        "Pairs", "the runs are logs of another trainer", lambda study: study.logged,
        "The runs are logs of another trainer. Logs of one seed are compared in pairs; whether they share data, "
        "initial weights and settings was not verified. Curves are put on one axis without smoothing. The difference "
        "of a pair is that of the tail of the loss: the mean over the points in the last part of the axis that all "
        "have. The gap is the mean difference over the pairs in which neither run failed.",
    ),
    Passage(
        "Pairs", "the runs are of this program", lambda study: not study.logged,
        "Runs of the same seed share initial weights and the order of the data, so they are compared in pairs. The "
        "difference of a pair is that of the tail of the validation loss: the mean over the validations in the last "
        "part of the steps that all runs have. The gap is the mean difference over seeds at which neither run failed.",
    ),
    Passage(
        "Records", "all records are verified", lambda study: not study.unverified,
        "The records, the configuration and the hashes of code and data of each run were verified by a hash chain and "
        "digests.",
    ),
    Passage(
        "Records", "the records of a run, or of its predecessor, are not verified",
        lambda study: study.unverified and not study.logged,
        "The records of some runs carry no hash chain and were not verified.",
    ),
    Passage(
        "Intervals", "two recipes or more share a baseline", lambda study: study.comparisons > 1,
        "Intervals are simultaneous for all recipes that share a baseline [@dunnett1955], with seeds as blocks; the "
        "multivariate t is integrated by quadrature [@genz2009].",
    ),
    Passage(
        "Intervals", "there is one recipe", lambda study: study.decided_by_interval and study.comparisons == 1,
        "The interval is Student's, for the paired differences over seeds.",
    ),
    Passage(
        "Intervals", "recipes share a variance", lambda study: study.pooled,
        "The variance is pooled over all recipes except those that are much noisier than the others (F test at 1 % "
        "over their number), with degrees of freedom that account for the shared baseline [@satterthwaite1946]. A "
        "noisy recipe in the pool therefore widens the intervals of the others. No recipe's variance is taken to be "
        "below its own estimate, because a preliminary test would make intervals too short [@bancroft1944].",
    ),
    Passage(
        "Intervals", "a recipe has a larger spread", lambda study: study.unpooled,
        "A recipe outside the pool, or with a larger spread than the pool (F test at 25 % [@bancroft1983]), is judged "
        "by its own variance and degrees of freedom [@hasler2008].",
    ),
    Passage(
        "Intervals", "recipes have different seeds", lambda study: study.comparisons > 1 and study.unlike_seeds,
        "Recipes have different seeds, so the smallest of their correlations is used for all, which can only widen the "
        "intervals [@sidak1968].",
    ),
    Passage(
        "Intervals", "a recipe has one pair", lambda study: study.one_pair,
        "One pair shows no spread and allows no decision.",
    ),
    Passage(
        "Verdicts", "always", _always,
        "By loss a recipe is lossless if the upper bound of its interval is below the margin, which is non-inferiority "
        "[@ich1998, section 3.3.2], lossy if the lower bound is above it, and inconclusive if neither holds. The "
        "verdict is lossy if the recipe is lossy by loss or unstable. It is lossless if it is lossless by loss, no run "
        "is missing, and the recipe failed alone at no more seeds than the baseline did, or its rate of failing "
        f"alone is shown to be below {100 * STABILITY_MARGIN:g} %.",
    ),
    Passage(
        "Verdicts", "a baseline has not learned",
        lambda study: any(verdict.judged.measured.unlearned for verdict in study.verdicts) and not study.logged,
        "A baseline with a loss above the entropy of the tokens' frequencies (or above 0.9 ln(vocabulary), if that is "
        "not recorded) has not learned and gives no verdict.",
    ),
    Passage(
        "Verdicts", "each recipe is compared at its best value of a key, chosen by other seeds",
        lambda study: study.selection is not None and not study.selection.by_all,
        "Each recipe was compared at its own best value of a key, chosen by the losses of seeds that were not judged, "
        "because the lowest of several losses is low by luck, too.",
    ),
    Passage(
        "Verdicts", "each recipe is compared at its best value of a key", lambda study: study.selection is not None,
        "A recipe is called lossy only if it is lossy at all of its own values, and lossless only if it is lossless "
        "against the baseline at every value, so the verdict holds whichever value is the best.",
    ),
    Passage(
        "Verdicts", "a search ended recipes early", lambda study: study.ended_by_search,
        "A search stopped other recipes early by their losses at the same seeds. These seeds both chose the remaining "
        "recipes and judge them, so the best of many may look better than it is; other seeds would avoid this.",
    ),
    Passage(
        "Verdicts", "looks were declared before the first run", lambda study: study.design is not None,
        "The looks declared before the first run divide the error by a spending function [@lan1983], with boundaries "
        "simulated for this exact procedure. The intervals are also simultaneous over all looks [@jennison1989].",
    ),
    Passage(
        "Verdicts", "the margin is in tokens", lambda study: study.terms.token_margin is not None,
        "A margin of a share m of tokens is the increase of the baseline's loss with D / (1 + m) tokens, interpolated "
        "at each seed between its own runs at other numbers of tokens, each with its own decay. A recipe is within it "
        "if the mean over seeds of difference minus margin is below zero. The interval includes the noise of the "
        "margin, and the ratios of gap to slope that it does not reject are Fieller's interval [@fieller1954].",
    ),
    Passage(
        "Verdicts", "the runs were looked at more than once", lambda study: len(study.looks) > 1 and not study.budgeted,
        looks_statement(),
    ),
    Passage(
        "Verdicts", "a verdict was required (`--require`)", lambda study: study.budgeted,
        "All looks of the series share the error of one verdict. Each spends half of the rest, or an equal part "
        "for each of a declared number of looks, and has its intervals at that error. By the union bound, the chance "
        "that any look is wrong is at most the error of one verdict.",
    ),
    Passage(
        "Verdicts", "more seeds would decide a verdict",
        lambda study: any(verdict.plan.more is not None for verdict in study.verdicts),
        f"Seeds are planned for true gaps of 0 and of {PLANNED_GAP} margins, for a probability of {100 * POWER:g} % "
        "of the correct verdict, averaged over the possible true spreads given the estimate [@ohagan2005]; the "
        "observed gap is not used [@hoenig2001].",
    ),
    Passage(
        "All pairs", "every recipe is compared with every other", lambda study: study.all_pairs,
        "Gaps between all recipes, including the baseline, are paired by seed as well. Their intervals are "
        "simultaneous over all pairs by the studentized range [@tukey1953], with a separate variance for a pair with a "
        "larger spread [@dunnett1980]. Verdicts use their own intervals, not these.",
    ),
    Passage(
        "Failures", "no run failed", lambda study: not study.failed,
        "A run fails if it diverges or its pair is an outlier; none did. The failure rate that this allows is given by "
        "its exact upper bound [@clopper1934].",
    ),
    Passage(
        "Failures", "a run failed", lambda study: study.failed,
        "A run failed if it diverged, or if its pair is among fewer than half of a recipe's pairs that are more than "
        f"{OUTLIER_FACTOR:g} times as far from zero as the margin, the A/A floor, the recipe's other pairs and the "
        "median of the other recipes' pairs. Failure rates have exact intervals [@clopper1934]. A recipe is unstable "
        "if it failed alone at more seeds than the baseline did, by McNemar's test [@mcnemar1947], exact and "
        "unconditional [@suissa1991], one-sided, with Bonferroni's correction for the number of recipes.",
    ),
    Passage(
        "Noise", "an A/A floor was measured", lambda study: any(verdict.floor.pairs for verdict in study.verdicts),
        "The A/A floor is the root mean square difference between runs of one recipe and seed that only differ in the "
        "order of sums (another micro-batch size, thread count or reduction).",
    ),
    Passage(
        "Noise", "curves are shown", lambda study: any(verdict.sound_pairs for verdict in study.verdicts),
        "The bands of a curve of differences are intervals of the same kind at each step: they are simultaneous over "
        "recipes, not over steps. Intervals on sources of the text are simultaneous over recipes, not over sources.",
    ),
    Passage(
        "Noise", "looks were declared and curves are shown",
        lambda study: study.design is not None and any(verdict.sound_pairs for verdict in study.verdicts),
        "Bands and intervals on sources use the confidence and the seeds of the look at which the recipe was judged. "
        "The tests for failures and spikes use that look's share of the error. Intervals of the rates of failures and "
        "spikes are those of a single look.",
    ),
    Passage(
        "Noise", "a run had a spike", lambda study: any(sum(verdict.spikes.total) for verdict in study.verdicts),
        "Spikes are judged by the seeds at which only one of the two runs spiked (McNemar's test, as for failures) "
        "and by the signs of the differences of their numbers [@fisher1935, section 21], each with half of the error.",
    ),
    Passage(
        "Branches", "the runs are branches", lambda study: any(verdict.switch for verdict in study.verdicts),
        "Branches off one checkpoint of a parent run are compared over their own steps, and the result holds for a "
        "recipe that is switched on there. Replicates are parent runs of several seeds. Seeds after one parent run "
        "only cover the part after it, and several such parent runs are judged separately: as replicates they would be "
        "pseudoreplicates [@hurlbert1984].",
    ),
    Passage(
        "Cost", "tokens to loss were measured",
        lambda study: any(verdict.cost.timed_pairs for verdict in study.verdicts),
        "Tokens to loss is the ratio of the tokens that recipe and baseline needed for the lowest loss that both "
        "reached; the ratio of the training seconds is recorded as well.",
    ),
    Passage(
        "Cost", "a target was given", lambda study: any(verdict.time_to_target for verdict in study.verdicts),
        "Time to a target is that of the first validation at it, without interpolation. A pair in which one run never "
        "arrives gives a lower or an upper bound of its ratio. The median over pairs is between the medians of these "
        "bounds, and the median of the times is the product-limit estimate if all runs have the same length "
        "[@kaplan1958]. The interval uses order statistics of the pairs [@thompson1936], the test is a sign test.",
    ),
    Passage(
        "Cost", "the baseline was run at other numbers of tokens",
        lambda study: any(verdict.effective_data for verdict in study.verdicts),
        "Gaps are converted to tokens by the baseline's own losses at other numbers of tokens, interpolated by "
        "E + B D^-beta. The interval contains every ratio that a t test over seeds of recipe minus baseline does not "
        "reject; near 1 it is Fieller's [@fieller1954].",
    ),
    Passage(
        "Ladder", "a law over sizes and tokens was fitted", lambda study: study.ladder,
        "The baseline's losses over N parameters and D tokens are fitted by L = E + A N^-alpha + B D^-beta "
        "[@hoffmann2022] with a weak prior on the exponents [@besiroglu2024]. A recipe's gaps are fitted by c_D B "
        "D^-beta + c_N A N^-alpha + c_O D / N: a loss of effective tokens, of effective parameters [@kumar2024], and a "
        "term that grows with tokens per parameter. Intervals are from a wild bootstrap over runs [@wu1986] of "
        "residuals divided by one minus their leverage [@mackinnon1985], with degrees of freedom by Satterthwaite "
        "[@satterthwaite1946]; they are not simultaneous. There is no prediction if the law misses by more than the "
        "scatter of seeds (F test for lack of fit [@fisher1922]) or of gaps (the same with a variance per size "
        "[@brown1974]), if the smaller sizes do not predict the largest (with a moderated variance [@smyth2004]), or "
        "beyond the stated range.",
    ),
)  # fmt: skip
"""All passages of the methods section in their order; consecutive passages with one heading form a paragraph."""


def _trained(study: Study) -> str:
    if study.logged:
        return f"Judged at {listed(list(dict.fromkeys(verdict.scale for verdict in study.verdicts)))}."
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
        sentences.append(f"{listed(study.emulated)} ran emulated: with the numerics of the format, but not its speed.")
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
    values = [f"{each:g}" if isinstance(each, int | float) else str(each) for each in found]
    return f"{listed(values)} {unit}".strip() if found else ""


def _range(span: tuple[int, int]) -> str:
    return f"{span[0]}" if span[0] == span[1] else f"{span[0]} to {span[1]}"


def listed(items: Sequence[str]) -> str:
    """Return `items` as an enumeration: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, with three or more in a row abbreviated: "0 to 4, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    ranges = [f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]
    return ", ".join(ranges)
