"""Notes to read with the verdicts: how far they reach, and what the runs cannot show."""

from collections.abc import Sequence

from lightning_llm.compare.branches import notes_on_branches
from lightning_llm.compare.factor import Factor
from lightning_llm.compare.pairing import Family
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.wording import power_statement, quantized_sentences


def notes_on(factor: Factor, families: Sequence[Family], verdicts: Sequence[Verdict]) -> list[str]:
    """Return what to read beside the verdicts, one sentence or two each."""
    notes = [factor.note] if factor.note else []
    notes.append(
        "A verdict holds at its model size and number of tokens. It rules recipes out; that one is lossless there does "
        "not say so for larger models or longer runs, where damage may grow: see how the gap moves over both."
    )
    if any(each.plan.if_no_gap and each.plan.more for each in verdicts):
        notes.append(power_statement())
    if any(each.judged.estimate.comparisons > 1 for each in verdicts):
        notes.append("The intervals of recipes that share a baseline hold together, not one by one (Dunnett).")
    runs = list({id(run): run for family in families for run in family.runs}.values())
    if any((run.summary.get("git") or {}).get("dirty") and "code_hash" not in run.summary for run in runs):
        notes.append("Some runs are of a changed checkout (git dirty): that they ran the same code is not recorded.")
    if any(run.summary.get("data_hash") is None for run in runs):
        notes.append(
            "Some runs do not name their data by a hash: that it was the same is known from the configs alone."
        )
    notes += [
        f"{run.name} went on from another folder at step {run.first_step}: its time to loss, spikes and skipped steps "
        "before that are not known."
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
            f"Speed, time to loss and memory are of runs that shared the machine, {' or '.join(map(str, at_once))} at "
            "once (launcher.at_once): not of a run alone, and the less like it the more its neighbours differed."
        )
    notes += quantized_sentences(verdicts)
    emulated = [each.name for each in verdicts if each.emulated]
    if emulated:
        notes.append(f"Emulated, so that their speed is none of the format's: {', '.join(dict.fromkeys(emulated))}.")
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
