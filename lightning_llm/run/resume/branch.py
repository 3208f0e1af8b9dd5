"""A branch: a run that continues from a trunk's checkpoint with keys changed on purpose. Imports no torch.

`settled` completes the config: the checkpoint is pinned, and the data continue where the trunk stopped. Keys that must
be the trunk's are checked here; `decide_start` decides from which checkpoint it starts, as for any other run.
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
from lightning_llm.config.schema.strict import Reading
from lightning_llm.config.weight_folders import TOKENIZER, run_of
from lightning_llm.data.mixing.phases import PhasedMixture, WeightPhase
from lightning_llm.data.tokens.tokenizer import tokenizer_file
from lightning_llm.run.launch.environment import rank_environment
from lightning_llm.run.resume.own_checkpoints import config_of_run
from lightning_llm.run.resume.start import Start, checkpoint_at, sizes_alone
from lightning_llm.run.resume.weights import begins_anew, shape_differences
from lightning_llm.tracking.files import TOKENIZER_DIGEST, summary_of
from lightning_llm.train.checkpoint.manifest import MANIFEST, Checkpoint, Damage, step_folders, step_of
from lightning_llm.train.checkpoint.verification import Verify, content_damage, skipped_lines

BRANCH = "branch"
"""The key of summary.json that says which trunk the run branched off, where, and what was changed."""
FIXED = {
    "data.sequence_length": "tokens and the position in the data are counted in it",
    "data.global_batch_size": "the position in the data is the number of steps times it",
    "optim.name": "each optimizer keeps a state of its own",
}
"""Keys that a branch has as its trunk, and why."""
WEIGHTS_ALONE = "Set it back; model.init_from takes the trunk's weights alone, into a run of any such key."
_looked: dict[tuple[Path, int], list[Damage]] = {}


def settled(reading: Reading) -> Reading:
    """Return the config with its branch settled, or with what is wrong with the trunk; any other as it is."""
    config = reading.config
    try:
        if config is None or config.branch_from is None:
            return reading
        return Reading(_settled(config), reading.problems)
    except ConfigError as error:
        return Reading(config, (*reading.problems, *error.problems))
    except BrokenKeyError:  # a wrong key, which is reported already
        return reading


def _settled(config: Config) -> Config:
    """Return `config` with `branch_from` naming one checkpoint, the one that its folder's run began at if it does.

    Raises:
        ConfigError: there is none, or none of those that are there is good.
    """
    path, run = Path(str(config.branch_from)), run_of(Path(str(config.branch_from)))
    goes_on = not begins_anew(config)
    if goes_on and run is None:
        return config  # its trunk is gone, and not needed any more
    pinned = _pinned_before(config, path)
    if pinned is None:
        pinned = path if goes_on and path != run else trunk_checkpoint(path, look_once).folder
    config = config.model_copy(update={KEY: str(pinned)})
    trunk = _trunk_of(pinned)
    data = config.data.model_copy(
        update={
            "mixture": _mixture(config, trunk, step_of(pinned)),
            "tokenizer": _tokenizer(config, trunk, pinned),
        }
    )
    return config.model_copy(update={"data": data})


def _pinned_before(config: Config, path: Path) -> Path | None:
    """Return the checkpoint that the run in the config's folder began at, where it is to go on and `path` agrees."""
    file = Path(config.run.dir) / "config.yaml"
    if config.resume != "auto" or not file.is_file():
        return None
    known = load_config(file, []).branch_from
    return Path(known) if known is not None and path in (Path(known), run_of(Path(known))) else None


def _trunk_of(pinned: Path) -> Config:
    run = run_of(pinned)
    if run is None:
        raise ConfigError(Problem(KEY, f"{pinned} belongs to no run. Give {EXPECTED}."))
    return load_config(run / "config.yaml", [])


def look_once(checkpoint: Checkpoint) -> list[Damage]:
    """Find what is wrong with the content, once in a process; the ranks of a run share that out among them."""
    if rank_environment() is not None:
        return sizes_alone(checkpoint)
    key = (checkpoint.folder, (checkpoint.folder / MANIFEST).stat().st_mtime_ns)
    if key not in _looked:
        _looked[key] = content_damage(checkpoint)
    return _looked[key]


def trunk_checkpoint(path: Path, verify: Verify) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest good one of the run whose folder it is; says what it passes over.

    Raises:
        ConfigError: there is none there, or it is damaged: with each file, and the next older good one.
    """
    run = run_of(path)
    if run is None:
        what = "holds no run" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        above = path.parent.parent
        there = _steps_there(above) if path.name.startswith("step=") and (above / "config.yaml").is_file() else ""
        raise ConfigError(Problem(KEY, f"{path} {what}. {there or f'Give {EXPECTED}.'}"))
    if path != run and not path.is_dir():
        raise ConfigError(Problem(KEY, f"{path} does not exist. {_steps_there(run)}"))
    try:
        found, passed_over = checkpoint_at(path, verify)
    except ConfigError as error:
        problems = [Problem(KEY, _for_branches(each.text)) if each.key == "resume" else each for each in error.problems]
        if older := _older_good(path, verify):
            problems.append(Problem(KEY, f"{path.name} cannot be taken; the next older good one: {KEY}={older}."))
        raise ConfigError(problems) from error
    for line in skipped_lines(passed_over):
        _say_once(line)
    if found is None:
        text = f"{path} has no checkpoint yet. It needs one: checkpoint.every_steps, or its last step."
        raise ConfigError(Problem(KEY, text))
    return found


def _for_branches(text: str) -> str:
    return text.replace("resume=PATH", f"{KEY}=PATH")


def _steps_there(run: Path) -> str:
    """Return which steps the run has checkpoints of, in a sentence."""
    steps = [str(step_of(each)) for each in reversed(step_folders(run / "checkpoints"))]
    return f"There are those of step {', '.join(steps)}." if steps else f"{run} has no checkpoint."


def _older_good(path: Path, verify: Verify) -> Path | None:
    """Return the newest good checkpoint beside the one at `path` and before it."""
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
def _say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _mixture(config: Config, trunk: Config, step: int) -> Any:
    """Return the branch's mixture: with other weights, phases in which each source goes on where the trunk left it.

    One that is given stays, and so does the kind of another package.
    """
    now, before = config.data.trained_weights, trunk.data.trained_weights
    mixture = trunk.data.mixture
    if config.data.mixture != mixture or now == before:
        return config.data.mixture
    if mixture is not None and not isinstance(mixture, PhasedMixture):
        return mixture
    if not any(before.get(name) for name in now) or any(weight and name not in now for name, weight in before.items()):
        return mixture  # sources that are gone have no share to give to the steps before
    phases: dict[str, WeightPhase] = {}
    for name, start, weights in _phases_before(mixture, before, trunk.trainer.max_steps, step):
        given = {source: weights.get(source, 0.0) for source in now}
        phases[name] = WeightPhase(start_step=start or None, weights=given)
    phases[f"from_step_{step}"] = WeightPhase(start_step=step)
    return PhasedMixture(phases=phases)


def _phases_before(
    mixture: PhasedMixture | None, weights: Mapping[str, float], max_steps: int, step: int
) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield name, first step and weights of each phase that the trunk had begun by `step`."""
    if mixture is None:
        yield "trunk", 0, dict(weights)
        return
    for name, phase in mixture.phases.items():
        total = mixture.total_steps or max_steps
        start = round(phase.start * total) if phase.start is not None else phase.start_step or 0
        if start < step:
            yield name, start, {source: phase.weights.get(source, weight) for source, weight in weights.items()}


def _tokenizer(config: Config, trunk: Config, pinned: Path) -> Any:
    """Return the branch's tokenizer: the trunk's own file where one would be trained on other sources."""
    tokenizer = config.data.tokenizer

    def texts(each: Config) -> dict[str, Any]:
        return {name: source.model_dump(exclude={"weight"}) for name, source in each.data.sources.items()}

    if tokenizer.kind != "bpe" or tokenizer != trunk.data.tokenizer or texts(config) == texts(trunk):
        return tokenizer
    path = str(Path(str(run_of(pinned))) / TOKENIZER)
    return tokenizer.model_copy(update={"kind": "file", "path": path, "vocab_size": None})


def branch_problems(config: Config) -> list[Problem]:
    """Return why the run cannot go on from its trunk: every key that must be the trunk's, and what is wrong with it."""
    if config.branch_from is None or not begins_anew(config):
        return []
    try:
        checkpoint = trunk_checkpoint(Path(config.branch_from), look_once)
        trunk = config_of_run(checkpoint)
        summary_of(checkpoint.run_folder)  # the branch's names its trunk's run id and data by it
    except ConfigError as error:
        return list(error.problems)
    except ValueError as error:
        return [Problem(KEY, f"{error}. Bring it back, or remove that file to branch without what it says.")]
    return [*_end_problems(config, checkpoint), *_key_problems(config, trunk, checkpoint.run_folder)]


def _end_problems(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    steps = config.trainer.max_steps
    if checkpoint.step < steps:
        return
    earlier = [each for each in step_folders(checkpoint.folder.parent) if step_of(each) < min(steps, checkpoint.step)]
    others = f", or go on from an earlier one: {KEY}={earlier[0]}" if earlier else ""
    text = f"is {steps}, and {checkpoint.folder} is at step {checkpoint.step}: no step is left. Raise it{others}."
    yield Problem("trainer.max_steps", text)


def _key_problems(config: Config, trunk: Config, run: Path) -> Iterator[Problem]:
    """Yield each key that must be as in the trunk, and is not."""
    same = "Set it back: a branch has its trunk's model."
    yield from shape_differences(trunk.model, config.model, whose=f"the trunk {run}", same=same)
    if config.model.vocab_size > trunk.model.vocab_size:
        text = f"is {config.model.vocab_size}, and {trunk.model.vocab_size} in the trunk {run}. {same}"
        yield Problem("model.vocab_size", text)
    if config.model.init_from != trunk.model.init_from:
        text = f"stands beside {KEY}, which gives weights and optimizer state. Leave one of them out."
        yield Problem("model.init_from", text)
    for key, why in FIXED.items():
        group, _, name = key.partition(".")
        now, before = (getattr(getattr(each, group), name) for each in (config, trunk))
        if now != before:
            yield Problem(key, f"is {now!r}, and {before!r} in the trunk {run}: {why}. {WEIGHTS_ALONE}")
    if (now := config.chosen_algorithm.name) != (before := trunk.chosen_algorithm.name):
        text = f"is {now!r}, and {before!r} in the trunk {run}: each keeps a state of its own. {WEIGHTS_ALONE}"
        yield Problem("algorithm.name", text)
    if not _same_tokenizer(config, trunk, run):
        take = f"data.tokenizer.kind=file data.tokenizer.path={run / TOKENIZER} data.tokenizer.vocab_size=null"
        text = (
            f"is another than that of the trunk {run}, whose weights know its ids alone. Leave it out, or take {take}."
        )
        yield Problem("data.tokenizer", text)


def _same_tokenizer(config: Config, trunk: Config, run: Path) -> bool:
    tokenizer = config.data.tokenizer
    if tokenizer == trunk.data.tokenizer:
        return True
    if tokenizer.kind != "file" or tokenizer.end_of_document != trunk.data.tokenizer.end_of_document:
        return False
    try:
        return digest_of_file(tokenizer_file(tokenizer.path or "")) == digest_of_file(run / TOKENIZER)
    except OSError:  # of the given file the rules of data say so
        return not (run / TOKENIZER).is_file()


def branch_facts(config: Config, start: Start) -> dict[str, Any]:
    """Return what summary.json is to say of the branch, {} for a run that is none.

    Under "branch": the `trunk`'s folder, run id, seed and `max_steps`, the `root_run_id` of the whole run that trunks
    which are branches themselves go back to, the `step` and `checkpoint` that the branch begins at, the `digest` of
    that state, and `changed`: {key: [the trunk's value, the branch's]}.
    """
    if config.branch_from is None or start.checkpoint is None:
        return {}
    checkpoint = start.checkpoint
    if start.trunk is None:  # it goes on, in its own folder or from it
        known = summary_of(checkpoint.run_folder).get(BRANCH)
        return {BRANCH: known} if known else {}
    trunk, run = start.trunk, checkpoint.run_folder
    above = summary_of(run).get(BRANCH) or {}
    return {
        BRANCH: {
            "trunk": str(run),
            "run_id": checkpoint.run_id,
            "root_run_id": above.get("root_run_id", checkpoint.run_id),
            "mlflow_run_id": summary_of(run).get("mlflow_run_id"),
            "seed": trunk.seed,
            "max_steps": trunk.trainer.max_steps,
            "step": checkpoint.step,
            "checkpoint": str(checkpoint.folder),
            "digest": checkpoint.digest,
            "changed": {key: list(values) for key, values in changed_keys(trunk, config).items()},
        }
    }


def check_branch_tokenizer(start: Start, tokenizer: Path) -> None:
    """Raise AgreedError where the branch's data were made tokens of by another tokenizer than its trunk's."""
    if start.trunk is None or start.checkpoint is None:
        return
    known = summary_of(start.checkpoint.run_folder).get(TOKENIZER_DIGEST)
    if known is not None and digest_of_file(tokenizer) != known:
        run = start.checkpoint.run_folder
        text = f"comes to another than the trunk's {run / TOKENIZER}, whose ids the weights know. Take that file."
        raise AgreedError(Problem("data.tokenizer", text))


def first_step(config: Config) -> int:
    """Return the steps that a settled config's run does not make itself: those of its trunk, 0 without one."""
    return 0 if config.branch_from is None else step_of(Path(config.branch_from))
