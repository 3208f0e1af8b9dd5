"""The trunk that a run is to branch off: its checkpoint, and the branch's config once that is known. No torch.

`settled` makes of the words what will be run: the checkpoint pinned, and the data going on where the trunk stopped.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.branching import EXPECTED, KEY
from lightning_llm.config.from_file import load_config
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.base import BrokenKeyError
from lightning_llm.config.schema.strict import Reading
from lightning_llm.config.weight_folders import TOKENIZER, run_of
from lightning_llm.data.mixing.phases import PhasedMixture, WeightPhase
from lightning_llm.run.launch.environment import rank_environment
from lightning_llm.run.resume.start import checkpoint_at, sizes_alone
from lightning_llm.run.resume.weights import begins_anew
from lightning_llm.train.checkpoint.manifest import (
    MANIFEST,
    Checkpoint,
    Damage,
    Verify,
    content_damage,
    passed_over_lines,
    step_folders,
    step_of,
)


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


_looked: dict[tuple[Path, int], list[Damage]] = {}


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
    for line in passed_over_lines(passed_over):
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
