"""A whole comparison: runs in, verdicts out, with everything that could not be used and why."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_llm.commands import resume_command
from lightning_llm.compare.estimate import Terms
from lightning_llm.compare.factor import Factor, choose_factor
from lightning_llm.compare.pairing import Family, pair_runs
from lightning_llm.compare.reading import Run, facts, read_run
from lightning_llm.compare.verdict import judge
from lightning_llm.compare.wording import power_statement
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.identity import NOT_IDENTITY, below

METHODS = (
    "Paired differences of the tail of the validation loss, seed as block; simultaneous two-sided intervals against "
    "the shared baseline: Dunnett 1955, by quadrature; variance pooled over recipes of like spread (F test, own spread "
    "where larger: Hasler and Hothorn 2008), degrees of freedom by Satterthwaite 1946; non-inferiority at the margin "
    "by the interval's bounds: ICH E9 1998."
)


@dataclass
class Comparison:
    """`verdicts` and `floors` as data; `runs` that were read, `problems` with what was given, `notes` to read along."""

    factor: Factor
    terms: Terms
    runs: list[Run]
    families: list[Family] = field(default_factory=list)
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    floors: list[dict[str, Any]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """Return what `compare.json` holds."""
        return {
            "factor": self.factor.name,
            "baseline": self.factor.baseline_label,
            "margin": self.terms.margin,
            "confidence": self.terms.confidence,
            "metric": self.terms.metric,
            "verdicts": self.verdicts,
            "aa": self.floors,
            "problems": [{"key": each.key, "text": each.text} for each in self.problems],
            "notes": self.notes,
            "methods": METHODS,
            "runs": [
                {
                    "folder": str(run.folder),
                    "level": self.factor.label(run),
                    "seed": run.seed,
                    "status": run.status,
                    "mlflow_run_id": run.summary.get("mlflow_run_id"),
                }
                for run in self.runs
            ],
        }


def read_all(folders: Sequence[Path]) -> tuple[list[Run], list[Problem]]:
    """Return the runs that can be read, and what is wrong with the others."""
    runs, problems = [], []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except ConfigError as error:
            problems += error.problems
    return runs, problems


def compare_runs(runs: Sequence[Run], terms: Terms, baseline: str | None = None) -> Comparison:
    """Return the verdicts over `runs`; `baseline` is "group=level" or "key=value", None for the usual one.

    Raises:
        ConfigError: where no verdict at all can be given, with every reason.
    """
    usable, unfinished, problems = _usable(runs)
    if len(usable) < 2:
        text = f"{len(usable)} finished run{'' if len(usable) == 1 else 's'}: a verdict needs a baseline and another."
        raise ConfigError([*problems, Problem("RUN", text)])
    if not any(terms.metric in run.validations for run in usable):
        known = ", ".join(sorted({key for run in usable for key in run.validations})) or "none at all"
        text = f"no run has a validation of '{terms.metric}'. These runs' validations have: {known}."
        raise ConfigError([*problems, Problem("--metric", text)])
    usable, notes = _newest_of_same(usable)
    try:
        factor = choose_factor(usable, baseline)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    usable, lost = _without_lost_baselines(usable, factor)
    comparison = Comparison(factor, terms, usable, problems=problems + lost, notes=notes)
    comparison.families, unpaired = pair_runs(usable, factor, unfinished)
    comparison.problems += [*unpaired, *_levels_without_a_run(unfinished, usable, factor)]
    for family in comparison.families:
        rows, floor, found = judge(family, factor, terms)
        comparison.verdicts += [row | {"emulated": _emulated(family, row["name"])} for row in rows]
        comparison.problems += found
        if floor is not None:
            comparison.floors.append(floor)
    if not comparison.verdicts:
        raise ConfigError(comparison.problems)
    comparison.notes += _notes(comparison)
    return comparison


def _usable(runs: Sequence[Run]) -> tuple[list[Run], list[Run], list[Problem]]:
    """Return the runs that reached their end, or lost their loss on the way, which is a result, too; and the others."""
    usable, unfinished, problems = [], [], []
    for run in runs:
        if run.finished or run.lost_its_loss:
            usable.append(run)
            continue
        unfinished.append(run)
        detail = str(run.summary.get("detail") or "").splitlines()
        why = f" ({detail[0][:200]})" if detail else ""
        further = "" if run.status == "running" else f"; {resume_command(run.folder)} goes on with it"
        after = f" after step {run.last_step}" if run.last_step else ""
        text = f"is not finished: {run.status}{after}{why}. Left out{further}."
        problems.append(Problem(str(run.folder), text))
    return usable, unfinished, problems


def _levels_without_a_run(unfinished: Sequence[Run], usable: Sequence[Run], factor: Factor) -> list[Problem]:
    """Say of which recipes there is no verdict at all, since no run of theirs came to its end."""
    seen = {factor.level(run) for run in usable}
    seeds: dict[str, list[int]] = {}
    for run in unfinished:
        if factor.level(run) not in seen:
            name = run.config.get(f"{factor.name}.name") or run.config.get(factor.name) or run.name
            seeds.setdefault(str(name), []).append(run.seed)
    text = "has no verdict: none of its runs is finished (seed{} {})."
    return [
        Problem(name, text.format("s" * (len(found) > 1), ", ".join(map(str, sorted(found)))))
        for name, found in seeds.items()
    ]


def _newest_of_same(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs without those made again in the same way to the same end, of which the newest counts.

    Made again in the same way to other losses (kernels whose sums depend on timing), both stay: an A/A pair.
    """
    newest: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: run.started_at):
        config = {key: value for key, value in run.config.items() if not below(key, NOT_IDENTITY)}
        same = (config, dict(facts(run)), not run.lost_its_loss and run.validations)
        newest[json.dumps(same, sort_keys=True, default=str)] = run
    kept = {id(run) for run in newest.values()}
    dropped = [run.name for run in runs if id(run) not in kept]
    notes = [f"Made again later to the same losses, so left out: {', '.join(dropped)}."] if dropped else []
    return [run for run in runs if id(run) in kept], notes


def _without_lost_baselines(runs: list[Run], factor: Factor) -> tuple[list[Run], list[Problem]]:
    lost = [run for run in runs if run.lost_its_loss and factor.level(run) == factor.baseline]
    text = f"the baseline {factor.baseline_label} itself diverged; nothing can be held against this run."
    return [run for run in runs if run not in lost], [Problem(str(run.folder), text) for run in lost]


def _notes(comparison: Comparison) -> list[str]:
    factor, verdicts = comparison.factor, comparison.verdicts
    notes = [factor.note] if factor.note else []
    notes.append(
        "A verdict holds at its model size and number of tokens. It rules recipes out; that one is lossless there does "
        "not say so for larger models or longer runs, where damage may grow: see how the gap moves over both."
    )
    if any(row["more_seeds"] for row in verdicts):
        notes.append(power_statement())
    if any(row["comparisons"] > 1 for row in verdicts):
        notes.append("The intervals of recipes that share a baseline hold together, not one by one (Dunnett).")
    runs = list({id(run): run for family in comparison.families for run in family.runs}.values())
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
        if run.first_step > 1
    ]
    notes += _short_tails(verdicts)
    if any(row["speed_confounders"] for row in verdicts):
        keys = sorted({key for row in verdicts for key in row["speed_confounders"]})
        notes.append(f"Speed and memory are not of like runs: they differ in {', '.join(keys)}.")
    at_once = sorted({run.at_once for run in runs} - {1})
    if at_once:
        notes.append(
            f"Speed, time to loss and memory are of runs that shared the machine, {' or '.join(map(str, at_once))} at "
            "once (launcher.at_once): not of a run alone, and the less like it the more its neighbours differed."
        )
    emulated = [row["name"] for row in verdicts if row["emulated"]]
    if emulated:
        notes.append(f"Emulated, so that their speed is none of the format's: {', '.join(dict.fromkeys(emulated))}.")
    return notes


def _short_tails(verdicts: Sequence[dict[str, Any]]) -> list[str]:
    """Return what to say where the tail is a single validation: what its noise adds to the spread need not be there."""
    steps = sorted({row["tail_steps"][0] for row in verdicts if len(row["tail_steps"]) == 1})
    if not steps:
        return []
    every = max(1, steps[0] // 40)  # four in the last tenth
    return [
        f"The tail is one validation (step {', '.join(map(str, steps))}), so nothing is averaged. The mean of several "
        f"has less of the noise from step to step: validate more often (trainer.validate_every_steps={every}), or take "
        "in more of what there is (--tail 0.3)."
    ]


def _emulated(family: Family, name: str) -> bool:
    runs = [pair.run for pair in family.recipes.get(name, ())]
    return any(
        run.summary.get("backend") == "emulated" or (run.typed is not None and run.typed.precision.quantises)
        for run in runs
        if run.summary.get("backend") != "native"
    )
