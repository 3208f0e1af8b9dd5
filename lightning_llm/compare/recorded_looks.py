"""Looks that were not declared, recorded in `looks.json` beside the runs: each is another chance of a false verdict.

The losses identify a look, not the files that they are read from.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.compare.looks import hash_of
from lightning_llm.compare.terms import Terms
from lightning_llm.tracking.files import write_json

if TYPE_CHECKING:
    from lightning_llm.compare.verdict import Verdict

LOOKS_FILE = "looks.json"
SAME_SHARE = 0.01
"""Largest difference between two logged losses that are one loss in two files, as a share of the margin.

At a margin of 0.01 this is 1e-4: TensorBoard stores 32-bit floats, and many logs four decimals. Losses of other runs
differ by their noise. Losses this close move an interval by at most 2 % of the margin, so the second look is hardly
another chance of a false verdict.
"""
FEWEST_PAIRS = 2
"""Least number of pairs with which a recipe can be called lossless. A look with fewer for all uses no error."""
LOOKS = (
    "Every look at a growing sweep is another chance of a false verdict. With a true gap at the margin, lossless is "
    "reported falsely in {few} of sweeps with looks after 2, 3, 4 and 5 seeds, and in {many} with looks after 2 to 20 "
    "seeds, instead of 2.5 %. Choose the number of seeds first, and take the verdict at that number."
)
FALSE_LOSSLESS_BY_LOOKS = {(2, 5): 0.068, (2, 20): 0.129}
"""{(first, last number of seeds at a look): rate of a false lossless at some look with the gap at the margin}, for one
recipe and 95 % intervals; from tests/compare/test_stability.py."""


@dataclass(frozen=True)
class RecordedLook:
    """One look as `looks.json` stores it: its time `at` (ISO 8601), terms, and by recipe its pairs and verdicts.

    `seen`: hash of the judged losses and the terms. `margin`: in nats, None if it was given as the share `token_margin`
    of tokens.
    """

    at: str
    seen: str
    margin: float | None
    confidence: float
    metric: str
    tail: float
    pairs: dict[str, int]
    verdicts: dict[str, str]
    token_margin: float | None = None
    baseline: str = ""
    data: str = ""
    """Hash of the judged losses, the metric and the tail, equal under every margin and confidence; empty in files of
    earlier releases."""
    spent: float | None = None
    """Error that this look used of the budget of its series (`error_budget`); None without --require."""
    budget: float | None = None
    planned_looks: int | None = None
    losses: dict[str, dict[str, list[float]]] | None = None
    """Loss of the tail by recipe and seed: [the baseline's, the recipe's]; None in files of earlier releases."""
    measured_in: str | None = None
    """Unit of a metric that another trainer logged; None for the project's own runs."""

    @property
    def identity(self) -> str:
        """Hash that identifies the judged losses: two looks with the same hash count as one look."""
        return self.data or self.seen

    def recognized(self, known: Sequence["RecordedLook"]) -> "RecordedLook":
        """Return this look with the hashes of an earlier one at the same logged losses, if files of them differ.

        So losses that were read from TensorBoard first and from a CSV then are one look. The project's own runs have
        exact losses, which the hashes identify.
        """
        for each in known:
            if each.data != self.data and self._has_losses_of(each):
                same_terms = [getattr(each, key) == getattr(self, key) for key in ("margin", "confidence", "tail")]
                seen = each.seen if all(same_terms) and each.token_margin == self.token_margin else self.seen
                return replace(self, seen=seen, data=each.identity, losses=each.losses)
        return self

    def _has_losses_of(self, other: "RecordedLook") -> bool:
        """Return whether both looks judged the same losses of logs, up to `SAME_SHARE`, whatever the metric's name."""
        if self.measured_in is None or self.measured_in != other.measured_in or self.baseline != other.baseline:
            return False
        if not self.losses or not other.losses or self.pairs != other.pairs or not all(self.losses.values()):
            return False
        if _seeds_of(self.losses) != _seeds_of(other.losses):
            return False
        nearest = SAME_SHARE * min([each for each in (self.margin, other.margin) if each is not None], default=0.01)
        return all(
            abs(ours - theirs) <= nearest
            for name, seeds in self.losses.items()
            for seed, losses in seeds.items()
            for ours, theirs in zip(losses, other.losses[name][seed], strict=True)
        )


def look_at(verdicts: Sequence["Verdict"], terms: Terms) -> RecordedLook:
    """Return the record of a look with these verdicts and terms; `seen` equals an earlier look's if nothing is new."""
    names = {id(each): " ".join(filter(None, (each.name, each.family.text))) for each in verdicts}
    shown = [
        [names[id(each)], each.factor.baseline_label, sorted(each.judged.measured.differences.items()),
         each.judged.measured.seeds, each.judged.measured.missing_seeds]
        for each in verdicts
    ]  # fmt: skip
    return RecordedLook(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        seen=hash_of([_asked(terms), shown], 16),
        margin=terms.margin if terms.token_margin is None else None,
        confidence=terms.confidence,
        metric=terms.metric,
        tail=terms.tail_share,
        pairs={names[id(each)]: len(each.judged.measured.seeds) for each in verdicts},
        verdicts={names[id(each)]: each.decision for each in verdicts},
        token_margin=terms.token_margin,
        baseline=verdicts[0].factor.baseline_label if verdicts else "",
        data=hash_of([terms.metric, terms.tail_share, shown], 16),
        losses={names[id(each)]: _losses_of(each) for each in verdicts},
        measured_in=terms.measured_in,
    )


def _losses_of(verdict: "Verdict") -> dict[str, list[float]]:
    """Return {seed: [loss of the baseline, loss of the recipe]} of the pairs that did not fail."""
    measured = verdict.judged.measured
    return {
        str(pair.run.seed): [measured.tail.of(pair.baseline), measured.tail.of(pair.run)]
        for pair in measured.pairs
        if measured.tail and pair.run.seed in measured.differences
    }


def _seeds_of(losses: Mapping[str, Mapping[str, Any]]) -> dict[str, set[str]]:
    return {name: set(seeds) for name, seeds in losses.items()}


def _asked(terms: Terms) -> dict[str, Any]:
    """Return the terms that determine verdicts, for the hash; other terms only change the display."""
    values = {key: getattr(terms, key) for key in ("margin", "confidence", "metric", "tail_share")}
    return values if terms.token_margin is None else values | {"token_margin": terms.token_margin}


def record_look(look: RecordedLook, folder: Path) -> list[RecordedLook]:
    """Append `look` to the looks recorded in `folder`, unless it saw nothing new, and return all of them.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: it does not contain looks.
    """
    known = read_looks(folder / LOOKS_FILE)
    looks = appended(known, look.recognized(known))
    if looks != known:
        write_looks(folder / LOOKS_FILE, looks)
    return looks


def appended(known: Sequence[RecordedLook], look: RecordedLook) -> list[RecordedLook]:
    """Return the `known` looks with `look` added, unless it repeats one of them (same losses, its error recorded)."""
    same = [each for each in known if each.seen == look.seen]
    recorded = any(each.spent is not None or look.spent is None for each in same)
    return list(known) if recorded else [*known, look]


def read_looks(file: Path) -> list[RecordedLook]:
    """Return the looks recorded in `file`, none if it does not exist.

    Raises:
        OSError: it cannot be read.
        ValueError: it does not contain looks.
    """
    try:
        return [_read(each) for each in json.loads(file.read_text(encoding="utf-8"))["looks"]] if file.exists() else []
    except (KeyError, TypeError, RecursionError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error}. Restore it from a copy, or move it away") from error


def write_looks(file: Path, looks: Sequence[RecordedLook]) -> None:
    """Write `looks` to `file`, atomically. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"looks": [asdict(each) for each in looks]})


def _read(each: Any) -> RecordedLook:
    """Return one recorded look. Raises TypeError or ValueError if it is invalid."""
    look = RecordedLook(**each)
    numbers: dict[str, Any] = {"confidence": look.confidence, "tail": look.tail}
    numbers |= {"token_margin": look.token_margin} if look.margin is None else {"margin": look.margin}
    numbers |= {key: value for key in ("spent", "budget") if (value := getattr(look, key)) is not None}
    wrong = [key for key, value in numbers.items() if type(value) not in (int, float) or not math.isfinite(value)]
    wrong += [key for key in ("at", "seen", "metric", "baseline", "data") if not isinstance(getattr(look, key), str)]
    for key, kind in (("pairs", int), ("verdicts", str)):
        found = getattr(look, key)
        if not isinstance(found, dict) or not all(type(value) is kind for value in found.values()):
            wrong.append(key)
    if look.planned_looks is not None and type(look.planned_looks) is not int:
        wrong.append("planned_looks")
    if look.measured_in is not None and not isinstance(look.measured_in, str):
        wrong.append("measured_in")
    if look.losses is not None and not _are_losses(look.losses):
        wrong.append("losses")
    if not wrong and look.pairs.keys() != look.verdicts.keys():
        wrong.append("pairs")
    if wrong:
        raise ValueError(f"a look has no valid {', '.join(wrong)}")
    return look


def _are_losses(found: Any) -> bool:
    """Return whether `found` is {recipe: {seed: [number, number]}}."""
    if not isinstance(found, dict) or not all(isinstance(seeds, dict) for seeds in found.values()):
        return False
    pairs = [pair for seeds in found.values() for pair in seeds.values()]
    return all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(type(each) in (int, float) and math.isfinite(each) for each in pair)
        for pair in pairs
    )


def looks_statement() -> str:
    """Return the sentence of reports on how repeated looks raise the rate of false verdicts."""
    few, many = (f"{100 * rate:.1f} %" for rate in FALSE_LOSSLESS_BY_LOOKS.values())
    return LOOKS.format(few=few, many=many)
