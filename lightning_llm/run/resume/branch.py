"""Branches: runs that continue from a parent run's checkpoint with changed keys. Imports no torch.

`with_branch_resolved` completes the config: it pins the checkpoint and continues the data where the parent stopped.
Keys that must equal the parent's are checked here. `decide_start` chooses the checkpoint, as for any other run.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import AgreedError, ConfigError, Problem
from lightning_llm.base.integrity import digest_of_file
from lightning_llm.config.branching import EXPECTED, KEY, changed_keys
from lightning_llm.config.from_file import load_config
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.base import BrokenKeyError
from lightning_llm.config.schema.validation import ParsedConfig
from lightning_llm.config.weight_folders import TOKENIZER, run_of
from lightning_llm.data.mixing.weights import PhasedMixture, WeightPhase
from lightning_llm.data.tokens.tokenizer import tokenizer_file
from lightning_llm.run.launch.environment import rank_environment
from lightning_llm.run.resume.start import Start, checkpoint_at, sizes_alone
from lightning_llm.run.resume.weights import begins_anew, shape_differences
from lightning_llm.tracking.files import TOKENIZER_DIGEST, summary_of
from lightning_llm.train.checkpoint.manifest import MANIFEST, Checkpoint, Damage, step_folders, step_of
from lightning_llm.train.checkpoint.verification import Verify, config_of_run, content_damage, skipped_lines

BRANCH = "branch"
"""Key of summary.json with the parent run, the step of the branch and the changed keys."""
FIXED = {
    "data.sequence_length": "the position in the data is counted in sequences of this length",
    "data.global_batch_size": "the position in the data is the number of steps times this size",
    "optim.name": "the optimizer state cannot be converted",
}
"""Keys that a branch must have in common with its parent run, and why."""
WEIGHTS_ALONE = "Set it back, or use model.init_from, which loads only the weights."
_looked: dict[tuple[Path, int], list[Damage]] = {}


def with_branch_resolved(reading: ParsedConfig) -> ParsedConfig:
    """Return the config with its branch resolved, or with the parent run's problems; other configs are unchanged."""
    config = reading.config
    try:
        if config is None or config.branch_from is None:
            return reading
        return ParsedConfig(_branch_resolved(config), reading.problems)
    except ConfigError as error:
        return ParsedConfig(config, (*reading.problems, *error.problems))
    except BrokenKeyError:  # an invalid key, already reported
        return reading


def _branch_resolved(config: Config) -> Config:
    """Return `config` with `branch_from` set to one checkpoint: where the run in its folder began, if it resumes.

    Raises:
        ConfigError: there is no checkpoint, or all are damaged.
    """
    path, run = Path(str(config.branch_from)), run_of(Path(str(config.branch_from)))
    goes_on = not begins_anew(config)
    if goes_on and run is None:
        return config  # the parent run was deleted and is not needed to resume
    pinned = _pinned_before(config, path)
    if pinned is None:
        pinned = path if goes_on and path != run else parent_checkpoint(path, look_once).folder
    config = config.model_copy(update={KEY: str(pinned)})
    parent = _parent_of(pinned)
    data = config.data.model_copy(
        update={
            "mixture": _mixture(config, parent, step_of(pinned)),
            "tokenizer": _tokenizer(config, parent, pinned),
        }
    )
    return config.model_copy(update={"data": data})


def _pinned_before(config: Config, path: Path) -> Path | None:
    """Return the checkpoint where the run in the config's folder began, if it is resumed and `path` agrees; or None."""
    file = Path(config.run.dir) / "config.yaml"
    if config.resume != "auto" or not file.is_file():
        return None
    known = load_config(file, []).branch_from
    return Path(known) if known is not None and path in (Path(known), run_of(Path(known))) else None


def _parent_of(pinned: Path) -> Config:
    run = run_of(pinned)
    if run is None:
        raise ConfigError(Problem(KEY, f"{pinned} is not in a run's folder. Give {EXPECTED}."))
    return load_config(run / "config.yaml", [])


def look_once(checkpoint: Checkpoint) -> list[Damage]:
    """Return the damaged files of a checkpoint; the result is cached, so that files are read once per process.

    In a rank of a run it returns [] without reading: ranks verify a checkpoint together, later.
    """
    if rank_environment() is not None:
        return sizes_alone(checkpoint)
    key = (checkpoint.folder, (checkpoint.folder / MANIFEST).stat().st_mtime_ns)
    if key not in _looked:
        _looked[key] = content_damage(checkpoint)
    return _looked[key]


def parent_checkpoint(path: Path, verify: Verify) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest intact one of the run at `path`; print a line for each skipped
    one.

    Raises:
        ConfigError: there is no checkpoint, or it is damaged: with each damaged file and the next older intact one.
    """
    run = run_of(path)
    if run is None:
        what = "contains no run" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        above = path.parent.parent
        there = _steps_there(above) if path.name.startswith("step=") and (above / "config.yaml").is_file() else ""
        raise ConfigError(Problem(KEY, f"{path} {what}. {there or f'Give {EXPECTED}.'}"))
    if path != run and not path.is_dir():
        raise ConfigError(Problem(KEY, f"{path} does not exist. {_steps_there(run)}"))
    try:
        found, skipped = checkpoint_at(path, verify)
    except ConfigError as error:
        problems = [Problem(KEY, _for_branches(each.text)) if each.key == "resume" else each for each in error.problems]
        if older := _older_good(path, verify):
            problems.append(Problem(KEY, f"{path.name} cannot be used. The next older intact one is {KEY}={older}."))
        raise ConfigError(problems) from error
    for line in skipped_lines(skipped):
        _report_once(line)
    if found is None:
        text = f"{path} has no checkpoint yet. Wait for its last step, or set its checkpoint.every_steps."
        raise ConfigError(Problem(KEY, text))
    return found


def _for_branches(text: str) -> str:
    return text.replace("resume=PATH", f"{KEY}=PATH")


def _steps_there(run: Path) -> str:
    """Return a sentence with the steps of the run's checkpoints."""
    steps = [str(step_of(each)) for each in reversed(step_folders(run / "checkpoints"))]
    return f"There are checkpoints of step {', '.join(steps)}." if steps else f"{run} has no checkpoint."


def _older_good(path: Path, verify: Verify) -> Path | None:
    """Return the newest intact checkpoint of the same run before the one at `path`; None if there is none."""
    if not path.name.startswith("step="):
        return None
    for each in step_folders(path.parent):
        if step_of(each) < step_of(path):
            try:
                found, _ = checkpoint_at(each, verify)
            except ConfigError:
                continue
            return found.folder if found else None
    return None


@cache
def _report_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _mixture(config: Config, parent: Config, step: int) -> Any:
    """Return the branch's mixture.

    If source weights changed, the mixture has phases in which each source continues where the parent run left it. A
    mixture that is given, or of another package, is kept.
    """
    now, before = config.data.trained_weights, parent.data.trained_weights
    mixture = parent.data.mixture
    if config.data.mixture != mixture or now == before:
        return config.data.mixture
    if mixture is not None and not isinstance(mixture, PhasedMixture):
        return mixture
    if not any(before.get(name) for name in now) or any(weight and name not in now for name, weight in before.items()):
        return mixture  # sources that were removed have no share in earlier steps
    phases: dict[str, WeightPhase] = {}
    for name, start, weights in _phases_before(mixture, before, parent.trainer.max_steps, step):
        given = {source: weights.get(source, 0.0) for source in now}
        phases[name] = WeightPhase(start_step=start or None, weights=given)
    phases[f"from_step_{step}"] = WeightPhase(start_step=step)
    return PhasedMixture(phases=phases)


def _phases_before(
    mixture: PhasedMixture | None, weights: Mapping[str, float], max_steps: int, step: int
) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield name, first step and weights of each phase that the parent run had begun before `step`."""
    if mixture is None:
        yield "trunk", 0, dict(weights)
        return
    for name, phase in mixture.phases.items():
        total = mixture.total_steps or max_steps
        start = round(phase.start * total) if phase.start is not None else phase.start_step or 0
        if start < step:
            yield name, start, {source: phase.weights.get(source, weight) for source, weight in weights.items()}


def _tokenizer(config: Config, parent: Config, pinned: Path) -> Any:
    """Return the branch's tokenizer: the parent run's file if a new one would be trained on other sources."""
    tokenizer = config.data.tokenizer

    def texts(each: Config) -> dict[str, Any]:
        return {name: source.model_dump(exclude={"weight"}) for name, source in each.data.sources.items()}

    if tokenizer.kind != "bpe" or tokenizer != parent.data.tokenizer or texts(config) == texts(parent):
        return tokenizer
    path = str(Path(str(run_of(pinned))) / TOKENIZER)
    return tokenizer.model_copy(update={"kind": "file", "path": path, "vocab_size": None})


def branch_problems(config: Config) -> list[Problem]:
    """Return the reasons why the run cannot branch from its parent run; [] if it can, or does not branch.

    They are a damaged checkpoint, and every key that must equal the parent's but does not.
    """
    if config.branch_from is None or not begins_anew(config):
        return []
    try:
        checkpoint = parent_checkpoint(Path(config.branch_from), look_once)
        parent = config_of_run(checkpoint)
        summary_of(checkpoint.run_folder)  # the branch's summary records the parent's run id and data
    except ConfigError as error:
        return list(error.problems)
    except ValueError as error:
        return [Problem(KEY, f"{error}. Restore the file, or remove it to branch without the parent run's summary.")]
    return [*_end_problems(config, checkpoint), *_key_problems(config, parent, checkpoint.run_folder)]


def _end_problems(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    steps = config.trainer.max_steps
    if checkpoint.step < steps:
        return
    earlier = [each for each in step_folders(checkpoint.folder.parent) if step_of(each) < min(steps, checkpoint.step)]
    others = f", or branch from an earlier checkpoint: {KEY}={earlier[0]}" if earlier else ""
    text = f"must be above {checkpoint.step}, the step of {checkpoint.folder}. Raise it{others}."
    yield Problem("trainer.max_steps", text, steps)


def _key_problems(config: Config, parent: Config, run: Path) -> Iterator[Problem]:
    """Yield a problem for each key that must equal the parent run's and does not."""
    same = "Set it back: a branch keeps the model of its parent run."
    yield from shape_differences(parent.model, config.model, whose=f"the parent run {run}", same=same)
    if config.model.vocab_size > parent.model.vocab_size:
        text = f"is {config.model.vocab_size}, but {parent.model.vocab_size} in the parent run {run}. {same}"
        yield Problem("model.vocab_size", text)
    if config.model.init_from != parent.model.init_from:
        text = f"cannot be used with {KEY}, which loads weights and optimizer state. Remove one of them."
        yield Problem("model.init_from", text)
    for key, why in FIXED.items():
        group, _, name = key.partition(".")
        now, before = (getattr(getattr(each, group), name) for each in (config, parent))
        if now != before:
            yield Problem(key, f"is {now!r}, but {before!r} in the parent run {run}: {why}. {WEIGHTS_ALONE}")
    if (now := config.chosen_algorithm.name) != (before := parent.chosen_algorithm.name):
        text = f"is {now!r}, but {before!r} in the parent run {run}: its state cannot be converted. {WEIGHTS_ALONE}"
        yield Problem("algorithm.name", text)
    if not _same_tokenizer(config, parent, run):
        take = f"data.tokenizer.kind=file data.tokenizer.path={run / TOKENIZER} data.tokenizer.vocab_size=null"
        text = f"differs from the tokenizer of the parent run {run}. Remove the override, or set {take}."
        yield Problem("data.tokenizer", text)


def _same_tokenizer(config: Config, parent: Config, run: Path) -> bool:
    tokenizer = config.data.tokenizer
    if tokenizer == parent.data.tokenizer:
        return True
    if tokenizer.kind != "file" or tokenizer.end_of_document != parent.data.tokenizer.end_of_document:
        return False
    try:
        return digest_of_file(tokenizer_file(tokenizer.path or "")) == digest_of_file(run / TOKENIZER)
    except OSError:  # a missing given file is reported by the checks of data
        return not (run / TOKENIZER).is_file()


def branch_facts(config: Config, start: Start) -> dict[str, Any]:
    """Return the facts about the branch for summary.json; {} for other runs.

    Under "branch": `trunk` (folder of the parent run), its run id, seed and `max_steps`, the `root_run_id` of the run
    at the start of a chain of branches, the `step`, `checkpoint` and state `digest` where the branch begins, and
    `changed`: {key: [value in the parent run, value in the branch]}.
    """
    if config.branch_from is None or start.checkpoint is None:
        return {}
    checkpoint = start.checkpoint
    if start.parent is None:  # the branch is resumed
        known = summary_of(checkpoint.run_folder).get(BRANCH)
        return {BRANCH: known} if known else {}
    parent, run = start.parent, checkpoint.run_folder
    above = summary_of(run).get(BRANCH) or {}
    return {
        BRANCH: {
            "trunk": str(run),
            "run_id": checkpoint.run_id,
            "root_run_id": above.get("root_run_id", checkpoint.run_id),
            "mlflow_run_id": summary_of(run).get("mlflow_run_id"),
            "seed": parent.seed,
            "max_steps": parent.trainer.max_steps,
            "step": checkpoint.step,
            "checkpoint": str(checkpoint.folder),
            "digest": checkpoint.digest,
            "changed": {key: list(values) for key, values in changed_keys(parent, config).items()},
        }
    }


def check_branch_tokenizer(start: Start, tokenizer: Path) -> None:
    """Raise AgreedError if the branch's data were tokenized with another tokenizer than the parent run's."""
    if start.parent is None or start.checkpoint is None:
        return
    known = summary_of(start.checkpoint.run_folder).get(TOKENIZER_DIGEST)
    if known is not None and digest_of_file(tokenizer) != known:
        run = start.checkpoint.run_folder
        text = f"differs from the parent run's tokenizer. Use {run / TOKENIZER}."
        raise AgreedError(Problem("data.tokenizer", text))


def first_step(config: Config) -> int:
    """Return the step at which a run with a resolved branch begins: the step of its checkpoint, 0 without a branch."""
    return 0 if config.branch_from is None else step_of(Path(config.branch_from))
