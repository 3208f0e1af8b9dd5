"""`plan -m`: print the jobs of a sweep, their states and costs, without starting any."""

import argparse
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.runs.factor import USUAL_BASELINES
from lightning_llm.config.config_hash import config_hash
from lightning_llm.config.schema.sweep import FEWEST_SIZES, FEWEST_TOKENS, SweepConfig
from lightning_llm.config.sweep_space import read_space, read_sweep_keys
from lightning_llm.model.flops import count_parameters, flops_per_token
from lightning_llm.plan.report import tokenizer_text, weights_text
from lightning_llm.plan.resolve import coverage_of
from lightning_llm.precision.module_rules import Coverage
from lightning_llm.run.resume.branch import first_step
from lightning_llm.sweep.jobs import SearchRequest, checked_jobs
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.run_state import SETTLED, state_of
from lightning_llm.tracking.sweep_definition import Job, Sweep, define
from lightning_llm.tracking.sweep_file import SEARCH, SEARCH_FILE

SHOWN = 3
"""Number of origins of weights or tokenizers shown in a line."""


def outline(arguments: argparse.Namespace) -> int:
    """Print what `train -m` with the same overrides would run, as text or (--json) as data. Return 0.

    Raises:
        ConfigError: with the problems of all jobs.
    """
    if arguments.matrix:
        raise ConfigError(Problem("--matrix", "is for one run. Remove -m, and use a preset without a sweep."))
    facts = _facts(arguments)
    print(json.dumps(facts, indent=1) if arguments.json else render(facts))
    return 0


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sweep as plain data, with its looks or its search, if any."""
    keys = read_sweep_keys(arguments.overrides, arguments.config_dir)
    if keys.search is not None:
        whole, about = search_facts(arguments, keys)
        return sweep_facts(whole, about.get("ended", ())) | {"search": about}
    composed = checked_jobs(arguments, to_train=False)
    if keys.until is None:
        return sweep_facts(define(*composed))
    from lightning_llm.sweep.decide import declared_sweep, most_jobs

    definition, design = declared_sweep(composed, keys)
    whole = definition()
    first, most = most_jobs(whole, design)
    return sweep_facts(whole) | {
        "sequential": {**design.as_data(), "words": design.text, "first_jobs": first, "most_jobs": most}
    }


def sweep_facts(whole: Sweep, ended: Collection[int] = ()) -> dict[str, Any]:
    """Return the sweep as JSON data for `plan -m --json`: `jobs` with sizes and states, and `left`, the remaining work.

    A stopped job counts completely in `left`, although it may resume from a checkpoint. `ended`: numbers of jobs that a
    search has stopped.
    """
    jobs = [_job_facts(job) | ({"state": "ended"} if job.number in ended else {}) for job in whole.jobs]
    left = [job for job in jobs if job["state"] not in (*SETTLED, "running", "ended")]
    return {
        "folder": str(whole.folder),
        "lacks": nothing_to_compare(whole, jobs),
        "hash": whole.hash,
        "axes": whole.axes,
        "weights": list(dict.fromkeys(weights_text(job.config) for job in whole.jobs)),
        "tokenizer": list(dict.fromkeys(tokenizer_text(job.config) for job in whole.jobs)),
        "launcher": whole.jobs[0].config.launcher.name,
        "at_once": whole.jobs[0].config.launcher.at_once,
        "jobs": jobs,
        "left": {
            "jobs": len(left),
            "tokens": sum(job["tokens"] for job in left),
            "flops": sum(job["flops"] for job in left),
        },
    }


def search_facts(arguments: argparse.Namespace, keys: SweepConfig) -> tuple[Sweep, dict[str, Any]]:
    """Return (sweep of the jobs known before a search, plan of the search as JSON data).

    Raises:
        ConfigError: with the problems that starting it would report.
    """
    asked = SearchRequest(arguments, keys, to_train=False)
    if keys.search == "halving":
        from lightning_llm.sweep.halving import planned_halving

        halving = planned_halving(asked)
        steps = ", ".join(map(str, halving.rungs))
        worse = f"those worse than the best by more than {keys.margin_nats:g}"
        text = f"halving of {len(halving.recipes)} recipes: {worse} end at "
        ended = [("ended before", each.reason) for each in halving.dropped.values()]
        about = {**halving.whole.declared[SEARCH], "words": f"{text}steps {steps}", "rows": ended}
        return halving.whole, {**about, "ended": sorted(halving.ended)}
    from lightning_llm.sweep.optuna_search import planned_search

    search = planned_search(asked, read_space(arguments.overrides, arguments.config_dir))
    about = {key: value for key, value in search.first.declared[SEARCH].items() if key != "derived"}
    seeds = len(search.baseline)
    jobs = f"{seeds} job{'s' * (seeds > 1)} of the baseline, at most {keys.trials * seeds} of trials"
    text = f"optuna, {keys.trials} trials ({_done(search.first)} done), {keys.sampler}, {_pruning(keys)}: {jobs}"
    return search.first, {**about, "words": text, "rows": [(key, values) for key, values in about["space"].items()]}


def _done(whole: Sweep) -> int:
    """Return the number of trials in the search's record."""
    file = whole.folder / SEARCH_FILE
    return len(json.loads(file.read_text(encoding="utf-8"))["trials"]) if file.is_file() else 0


def _pruning(keys: SweepConfig) -> str:
    if keys.pruning == "none":
        return "no pruning"
    here = "" if keys.startup_trials < keys.trials else ", so none here"
    return f"pruning by the {keys.pruning} after {keys.startup_trials} whole trials{here}"


def nothing_to_compare(whole: Sweep, jobs: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a note on a ladder with only one recipe on each rung, which cannot be judged; None for other sweeps.

    `jobs`: facts of the jobs, as in `sweep_facts`.
    """
    places = [(job["parameters"], job["tokens"], each.config.seed) for job, each in zip(jobs, whole.jobs, strict=True)]
    sizes, tokens = ({place[axis] for place in places} for axis in (0, 1))
    if len(sizes) < FEWEST_SIZES or len(tokens) < FEWEST_TOKENS or len(set(places)) < len(places):
        return None
    recipe = whole.jobs[0].config.precision.name
    both = f"{recipe},mxfp8" if recipe in USUAL_BASELINES["precision"] else f"bf16,{recipe}"
    return (
        f"a baseline or a second recipe: each of {len(sizes)} sizes has one run per number of tokens and seed, so "
        f"`ladder` has no gap to fit. Use two, for example precision={both}"
    )


def _job_facts(job: Job) -> dict[str, Any]:
    config = job.config
    steps = config.trainer.max_steps - first_step(config)
    covered = coverage_of(config)
    tokens = config.data.global_batch_size * config.data.sequence_length * steps
    return {
        "number": job.number,
        "words": list(job.overrides),
        "state": _state(job.folder),
        "parameters": count_parameters(config.model).total,
        "tokens": tokens,
        "flops": flops_per_token(config.model, config.data.sequence_length) * tokens,
        "config_hash": config_hash(config),
        "precision": config.precision.name,
        "quantized": covered.as_data() if covered else None,
    }


def _quantized_rows(jobs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return one row per recipe and model size, with the share of the model that the recipe quantizes."""
    found: dict[str, None] = {}
    several = len({job["parameters"] for job in jobs}) > 1
    for job in jobs:
        if job["quantized"]:
            counts = Coverage(**job["quantized"])
            size = f" at {job['parameters']:,} parameters" if several else ""
            found[f"{job['precision']}{counts.suffix}{size}: {counts.text}"] = None
    return [("quantized", text) for text in found]


def _state(folder: Path) -> str:
    """Return `state_of`, or "damaged" if the summary cannot be read."""
    try:
        summary_of(folder)
    except ValueError:
        return "damaged"
    return state_of(folder)


def _few(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more


def render(facts: dict[str, Any]) -> str:
    """Return the result of `sweep_facts` as text for a terminal."""
    states = Counter(job["state"] for job in facts["jobs"])
    left = facts["left"]
    count = f"{left['jobs']} job{'' if left['jobs'] == 1 else 's'}"
    further = []
    if looks := facts.get("sequential"):
        jobs = f"{looks['first_jobs']} jobs for the first, {looks['most_jobs']} if nothing is decided early"
        further = [("looks", f"{looks['words']}; {jobs}")]
    if search := facts.get("search"):
        further = [("search", search["words"]), *search["rows"]]
        if "space" in search:
            count += " before the first trial"
    where = f"numbered from 0; {facts['launcher']}, {facts['at_once']} at once"
    rows = [("folder", facts["folder"])]
    rows += [(key, ", ".join(values)) for key, values in facts["axes"].items()]
    rows += [(key, _few(facts[key])) for key in ("weights", "tokenizer")]
    rows += further
    rows += [("lacks", facts["lacks"])] if facts["lacks"] else []
    rows += [
        ("jobs", f"{len(facts['jobs'])} ({where}): {', '.join(f'{states[state]} {state}' for state in states)}"),
        ("left", f"{count}, at most {left['tokens']:,} tokens, {left['flops']:.4g} FLOPs"),
    ]
    width = max(17, *(len(name) for name, _ in rows))
    lines = [f"{name:<{width}} {text}" for name, text in [*rows, *_quantized_rows(facts["jobs"])]]
    for job in facts["jobs"]:
        size = f"{job['parameters']:,} parameters, {job['tokens']:,} tokens"
        lines.append(f"job {job['number']:<{width - 4}} {' '.join(job['words']) or 'as it is'}: {size}, {job['state']}")
    return "\n".join(lines)
