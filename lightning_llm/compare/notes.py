"""Notes to read with the verdicts: how far they reach, and what the runs cannot show."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_llm.base.terminal import shown
from lightning_llm.compare.runs.branches import notes_on_branches
from lightning_llm.compare.runs.factor import Factor
from lightning_llm.compare.runs.losses import LOSS
from lightning_llm.compare.runs.pairing import Family
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.wording import power_statement, quantized_sentences
from lightning_llm.tracking.reading import Run


def notes_on(
    factor: Factor, families: Sequence[Family], verdicts: Sequence[Verdict], damaged: Sequence[Path] = ()
) -> list[str]:
    """Return what to read beside the verdicts, one sentence or two each."""
    notes = [factor.note] if factor.note else []
    notes.append(
        "A verdict holds at its model size and number of tokens. It can rule a recipe out; lossless here does not "
        "imply lossless for larger models or longer runs, where damage may grow: see how the gap moves over both."
    )
    if any(each.plan.if_no_gap and each.plan.more for each in verdicts):
        notes.append(power_statement())
    if any(each.judged.estimate.comparisons > 1 for each in verdicts):
        notes.append("The intervals of recipes that share a baseline hold together, not one by one (Dunnett).")
    runs = list({id(run): run for family in families for run in family.runs}.values())
    notes += [*_on_records(runs, damaged), *_on_middles(runs)]
    if any((run.summary.get("git") or {}).get("dirty") and "code_hash" not in run.summary for run in runs):
        notes.append("Some runs are of a changed checkout (git dirty): that they ran the same code is not recorded.")
    if unnamed := [run for run in runs if run.summary.get("data_hash") is None]:
        notes.append(
            f"Some runs do not name their data by a hash ({_named(unnamed)}): that it was the same is known from the "
            "configs alone."
        )
    notes += [
        f"{run.name} went on from another folder at step {run.first_step}: its tokens to loss, spikes and skipped "
        "steps before that are not known."
        for run in runs
        if run.first_step > 1 and not run.branch
    ]
    notes += notes_on_branches(runs)
    notes += _short_tails(verdicts)
    if keys := sorted({key for each in verdicts for key in each.cost.speed_confounders}):
        notes.append(f"Speed and memory are not of like runs: they differ in {', '.join(keys)}.")
    at_once = sorted({run.at_once for run in runs} - {1})
    if at_once:
        notes.append(
            f"Speed, seconds to loss and memory are of runs that shared the machine, {' or '.join(map(str, at_once))} "
            "at once (launcher.at_once): not of a run alone, and the less like it the more its neighbours differed."
        )
    notes += quantized_sentences(verdicts)
    emulated = [each.name for each in verdicts if each.emulated]
    if emulated:
        notes.append(f"Emulated, so that their speed is none of the format's: {', '.join(dict.fromkeys(emulated))}.")
    return notes


MOST_NAMED = 6
"""Runs that a note names one by one."""


def _named(runs: Iterable[Run]) -> str:
    names = [run.name for run in runs]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def _on_records(runs: Sequence[Run], damaged: Sequence[Path]) -> list[str]:
    """Return what to say of damaged runs, and of those whose records nothing verifies, by why."""
    notes = []
    if damaged:
        names = ", ".join(str(shown("/".join(folder.parts[-2:]))) for folder in damaged)
        notes.append(
            f"Damaged, and left out: {names}. Beside them no recipe is called lossless. Bring their files back from a "
            "copy, make them again, or compare the sound runs by naming these alone."
        )
    reasons: dict[str, list[Run]] = {}
    for run in runs:
        if run.unverified:
            reasons.setdefault(run.unverified, []).append(run)
    notes += [f"Records not verified, since {why}: {_named(found)}." for why, found in reasons.items()]
    return notes


def _on_middles(runs: Sequence[Run]) -> list[str]:
    """Return a note for each run that went on after a validation whose loss was not finite."""
    notes = []
    for run in runs:
        losses = run.validations.get(LOSS, {})
        lost = [step for step in sorted(losses)[:-1] if not math.isfinite(losses[step])]
        if lost and math.isfinite(losses[max(losses)]):
            notes.append(f"{run.name} had a validation loss that was not finite at step {', '.join(map(str, lost))}.")
    return notes


def _short_tails(verdicts: Sequence[Verdict]) -> list[str]:
    """Return what to say where the tail is a single validation: what its noise adds to the spread need not be there."""
    tails = [each.judged.measured.tail for each in verdicts]
    steps = sorted({tail.steps[0] for tail in tails if tail and len(tail.steps) == 1})
    if not steps:
        return []
    every = max(1, steps[0] // 40)  # four in the last tenth
    earlier = any(
        0.7 * steps[-1] < step < steps[-1]
        for each in verdicts
        for pair in each.pairs
        for step in pair.run.validations.get(each.terms.metric, {})
    )
    more = ", or take in more of what there is (--tail 0.3)" if earlier else ""
    return [
        f"The tail is one validation (step {', '.join(map(str, steps))}), so nothing is averaged. The mean of several "
        f"has less of the noise from step to step: validate more often (trainer.validate_every_steps={every}){more}."
    ]
