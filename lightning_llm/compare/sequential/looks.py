"""The looks at a growing sweep: each is another chance to err, so each is written down beside the runs."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_llm.compare.terms import Terms
from lightning_llm.compare.verdict import Verdict
from lightning_llm.tracking.files import write_json

FILE = "looks.json"
LOOKS = (
    "Every look at a growing sweep is another chance to err: with a true gap at the margin, lossless is reported "
    "falsely at some look of {few} where the looks are after 2, 3, 4 and 5 seeds, of {many} over 2 to 20, and not "
    "2.5 %. Choose the number of seeds first, and take the verdict at that number."
)
FALSE_LOSSLESS_BY_LOOKS = {(2, 5): 0.068, (2, 20): 0.129}
"""{(first, last number of seeds looked at): how often lossless is reported at some look at a gap of the margin}: one
recipe, 95 % intervals; tests/compare/test_stability.py."""


@dataclass(frozen=True)
class Look:
    """One look: `at` (ISO 8601), what was asked for, pairs and verdicts by recipe; `seen` is a hash of the losses.

    `margin` in nats, None where it was given as the share `token_margin` of tokens.
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


def look_at(verdicts: Sequence[Verdict], terms: Terms) -> Look:
    """Return this look, which equals an earlier one in `seen` where there is nothing new."""
    names = {id(each): " ".join(filter(None, (each.name, each.family.words))) for each in verdicts}
    shown = [
        [names[id(each)], each.factor.baseline_label, sorted(each.judged.measured.differences.items()),
         each.judged.measured.seeds, each.judged.measured.missing_seeds]
        for each in verdicts
    ]  # fmt: skip
    digest = sha256(json.dumps([_asked(terms), shown], sort_keys=True).encode()).hexdigest()[:16]
    return Look(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        seen=digest,
        margin=terms.margin if terms.token_margin is None else None,
        confidence=terms.confidence,
        metric=terms.metric,
        tail=terms.tail_share,
        pairs={names[id(each)]: len(each.judged.measured.seeds) for each in verdicts},
        verdicts={names[id(each)]: each.decision for each in verdicts},
        token_margin=terms.token_margin,
    )


def _asked(terms: Terms) -> dict[str, Any]:
    """Return the terms that verdicts follow from, as they are hashed; what is shown beside these is no look."""
    words = {key: getattr(terms, key) for key in ("margin", "confidence", "metric", "tail_share")}
    return words if terms.token_margin is None else words | {"token_margin": terms.token_margin}


def record_look(look: Look, folder: Path) -> list[Look]:
    """Return all looks at the runs of `folder`, this one last if it saw anything new, and keep them in its `FILE`.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: it holds no looks.
    """
    file = folder / FILE
    try:
        known = [_read(each) for each in json.loads(file.read_text(encoding="utf-8"))["looks"]] if file.exists() else []
    except (KeyError, TypeError, RecursionError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error}. Restore it from a copy, or move it away") from error
    if any(each.seen == look.seen for each in known):
        return known
    folder.mkdir(parents=True, exist_ok=True)
    write_json(file, {"looks": [asdict(each) for each in [*known, look]]})
    return [*known, look]


def _read(each: Any) -> Look:
    """Return one look as it was written. Raises TypeError or ValueError where it is none."""
    look = Look(**each)
    numbers: dict[str, Any] = {"confidence": look.confidence, "tail": look.tail}
    numbers |= {"token_margin": look.token_margin} if look.margin is None else {"margin": look.margin}
    wrong = [key for key, value in numbers.items() if type(value) not in (int, float) or not math.isfinite(value)]
    wrong += [key for key in ("at", "seen", "metric") if not isinstance(getattr(look, key), str)]
    for key, kind in (("pairs", int), ("verdicts", str)):
        found = getattr(look, key)
        if not isinstance(found, dict) or not all(type(value) is kind for value in found.values()):
            wrong.append(key)
    if not wrong and look.pairs.keys() != look.verdicts.keys():
        wrong.append("pairs")
    if wrong:
        raise ValueError(f"a look has no sound {', '.join(wrong)}")
    return look


def looks_statement() -> str:
    """Return what repeated looks do to the error rate."""
    few, many = (f"{100 * rate:.1f} %" for rate in FALSE_LOSSLESS_BY_LOOKS.values())
    return LOOKS.format(few=few, many=many)
