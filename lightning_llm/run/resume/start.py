"""The start of a run, decided by what lies in run.dir: it may start there, go on, or is done. Imports no torch."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.branching import changed_keys
from lightning_llm.config.commands import how_to_go_further
from lightning_llm.config.config_hash import below, differences_on_resume, is_data_path
from lightning_llm.config.from_file import load_config
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import same_folder
from lightning_llm.run.resume.own_checkpoints import (
    POLICY,
    changed_since,
    config_of_run,
    edited_text,
    known_summary,
    of_its_run,
    with_records,
)
from lightning_llm.run.resume.rollback import Rollback, read_rollbacks, with_same_samples
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.liveness import whose
from lightning_llm.tracking.run_state import settled_state, state_of
from lightning_llm.train.checkpoint.manifest import MANIFEST, Checkpoint, Damage, RunIdentity
from lightning_llm.train.checkpoint.verification import Verify, newest_verified, verified

LEARNED = ("data.max_tokens", "data.sources.", "data.mixture.", "data.tokenizer.", "data.validation.")
"""Keys that `data_hash` depends on."""
INIT = "init"
"""The key of summary.json that says what weights the run started from."""
DISTIL, TEACHERS = "distil", "distil.teachers"
"""The key of summary.json that says who the teachers are, and that of the config that says where."""


@dataclass(frozen=True)
class Start:
    """How a run starts: from `checkpoint`, or from nothing; `finished` if there is nothing left to do.

    `made_steps`: those of a finished run whose checkpoints are gone. `passed_over`: newer checkpoints that are damaged
    or another run's. `ended`: who ended a run before its last step, and why. `run`: whose the checkpoints to come are.
    `data_hash`: of what the steps before were trained on, where that is known and these are the data still. `trunk`:
    the config of the run that this one branches off here; None of any other start. `rollbacks`: of the steps before.
    """

    checkpoint: Checkpoint | None = None
    finished: bool = False
    made_steps: int = 0
    ended: str = ""
    passed_over: tuple[Damage, ...] = ()
    run: RunIdentity = field(default_factory=RunIdentity.new, compare=False)
    data_hash: str | None = None
    trunk: Config | None = None
    rollbacks: tuple[Rollback, ...] = ()

    @property
    def step(self) -> int:
        """Optimizer steps made before the start."""
        return self.checkpoint.step if self.checkpoint else self.made_steps

    def changes_optimizer(self, config: Config) -> bool:
        """Return whether the run branches off one whose optimizer had other options."""
        trunk = self.trunk
        if trunk is None:
            return False
        return (config.optim, config.precision.optimizer) != (trunk.optim, trunk.precision.optimizer)

    def nothing_left(self, config: Config) -> str:
        """Return what to say of a finished run, and how it can go on."""
        if self.ended:
            return (
                f"{config.run.dir} is finished at step {self.step} of {config.trainer.max_steps}: {self.ended}. "
                "It goes on where that callback is left out or set to something else"
            )
        return how_to_go_further(config.run.dir, self.step)


def sizes_alone(checkpoint: Checkpoint) -> list[Damage]:
    """Find nothing beyond what opening a checkpoint finds: for a first look, before the ranks verify its content."""
    return []


def decide_start(config: Config, verify: Verify = sizes_alone) -> Start:
    """Return what `_decide` says, with the rollbacks of the steps before.

    Raises:
        ConfigError: as `_decide`; or nothing says what the rollbacks were.
    """
    start = _decide(config, with_same_samples(config, verify))
    if start.checkpoint is not None:
        return replace(start, rollbacks=read_rollbacks(start.checkpoint.run_folder))
    return replace(start, rollbacks=read_rollbacks(Path(config.run.dir))) if config.resume is not None else start


def _decide(config: Config, verify: Verify) -> Start:
    """Return how this run starts; changes nothing.

    A run that begins does so at step 0 or, with `branch_from`, at its trunk's checkpoint.
    `resume=null` wants a folder without a run. `resume=auto` goes on from the folder's newest checkpoint that `verify`
    finds nothing wrong with, or afresh where there is none. `resume=PATH` goes on from that checkpoint, or the newest
    of that run, in its own run's folder or in a new one.

    Raises:
        ConfigError: the folder holds something else, the configs differ, or no checkpoint of those there verifies.
    """
    folder = Path(config.run.dir)
    holds_run = (folder / "config.yaml").is_file()
    if holds_run:
        _refuse_running(folder, wait=config.resume is not None)
    if config.resume is None:
        if folder.is_dir() and any(folder.iterdir()):
            what = "a run" if holds_run else "files that are no run's"
            text = f"{folder} already holds {what}. Set resume=auto to go on with it, or another run.name or run.dir."
            raise ConfigError(Problem("run.dir", text))
        return first_start(config, verify)
    if config.resume == "auto":
        if not holds_run:
            if folder.is_dir() and any(folder.iterdir()):
                text = f"{folder} holds files that are no run's. Choose another run.name or run.dir."
                raise ConfigError(Problem("run.dir", text))
            return first_start(config, verify)
        of_run = of_its_run(with_records(config, verify))
        checkpoint, passed_over = newest_verified(folder / "checkpoints", of_run, _went_back(config, folder))
        _must_match(config, folder, checkpoint)
        if ended := _ended_early(config, folder):
            return Start(checkpoint, True, int(summary_of(folder)["ended_by"]["step"]), ended)
        if checkpoint is None and not passed_over and state_of(folder) == "finished":
            return _finished_without_checkpoint(config, folder)
        if checkpoint is None and (origin := load_config(folder / "config.yaml", []).resume) not in (None, "auto"):
            # It died before it had saved its own start, which is not step 0.
            begun = config.model_copy(update={"resume": origin})
            checkpoint, passed_over = _at_path(begun, folder, holds_run=False, verify=verify)
    else:
        checkpoint, passed_over = _at_path(config, folder, holds_run, verify)
    if checkpoint is not None and checkpoint.step > config.trainer.max_steps:
        text = f"is {config.trainer.max_steps}, and the checkpoint is at step {checkpoint.step}. Raise it."
        raise ConfigError(Problem("trainer.max_steps", text))
    if checkpoint is None:
        start = first_start(config, verify)
        return replace(start, passed_over=(*passed_over, *start.passed_over))
    if checkpoint.step == config.trainer.max_steps and not holds_run:
        text = f"is {config.trainer.max_steps}, the checkpoint's step: in a new folder no step is left. Raise it."
        raise ConfigError(Problem("trainer.max_steps", text))
    done = checkpoint.step >= config.trainer.max_steps and state_of(folder) == "finished"
    run, data_hash = _identity(checkpoint, folder), summary_of(checkpoint.run_folder).get("data_hash")
    return Start(checkpoint, done, passed_over=passed_over, run=run, data_hash=data_hash)


def first_start(config: Config, verify: Verify) -> Start:
    """Return the start of a run that has made no step: nothing, or its trunk's checkpoint."""
    if config.branch_from is None:
        return Start()
    checkpoint, passed_over = checkpoint_at(Path(config.branch_from), verify)
    if checkpoint is None:
        raise ConfigError(Problem("branch_from", f"{config.branch_from} holds no checkpoint."))
    trunk = config_of_run(checkpoint)
    same_data = not any(below(key, LEARNED) and not is_data_path(key) for key in changed_keys(trunk, config))
    data_hash = summary_of(checkpoint.run_folder).get("data_hash") if same_data else None
    run = RunIdentity.new(begun_at_step=checkpoint.step)
    return Start(checkpoint, passed_over=passed_over, run=run, data_hash=data_hash, trunk=trunk)


def _identity(checkpoint: Checkpoint, folder: Path) -> RunIdentity:
    """Return who goes on from `checkpoint` in `folder`: the run that saved it, or a new one that begins there."""
    if not same_folder(checkpoint.run_folder, folder):
        return RunIdentity.new(begun_at_step=checkpoint.step)
    known = RunIdentity.of_summary(summary_of(folder))
    return known or RunIdentity(checkpoint.run_id or RunIdentity.new().id, begun_at_step=None)


def _ended_early(config: Config, folder: Path) -> str:
    """Return by whom the run was ended before its last step, and why; "" if by none, or none that would do so again."""
    summary = summary_of(folder)
    ended = summary.get("ended_by")
    if not isinstance(ended, dict) or summary.get("status") != "finished":
        return ""
    before, name = load_config(folder / "config.yaml", []).callbacks, ended.get("callback")
    now = config.callbacks
    if name is not None:
        before, now = ({name: each.get(name.removeprefix("callbacks."))} for each in (before, now))
    return f"ended by {name or 'a callback'} ({ended.get('reason')})" if before == now else ""


def _went_back(config: Config, folder: Path) -> bool:
    """Return whether it is rollbacks that may have left no checkpoint, and not what the config leaves out by now."""
    if not read_rollbacks(folder):
        return False
    return load_config(folder / "config.yaml", []).data.skip_samples == config.data.skip_samples


def _finished_without_checkpoint(config: Config, folder: Path) -> Start:
    """Return that nothing is left to do. To begin afresh would wipe the run.

    Raises:
        ConfigError: another number of steps is asked for.
    """
    steps = load_config(folder / "config.yaml", []).trainer.max_steps
    if config.trainer.max_steps != steps:
        text = (
            f"{folder} is finished at step {steps} and its checkpoints are gone, so nothing can go on to "
            f"trainer.max_steps={config.trainer.max_steps}. Choose another run.name, or bring them back."
        )
        raise ConfigError(Problem("resume", text))
    return Start(None, finished=True, made_steps=steps)


def _refuse_running(folder: Path, wait: bool) -> None:
    """Raise ConfigError where the folder's run is under way, or where nothing says whether it is."""
    try:
        fingerprint = summary_of(folder).get("process", "")
    except ValueError as error:
        text = f"{error}. If no process trains there, remove that file: resume=auto goes on from the last checkpoint."
        raise ConfigError(Problem("run.dir", text)) from error
    if (settled_state(folder) if wait else state_of(folder)) == "running":
        text = f"{folder} is being trained right now, by {whose(fingerprint)}. Wait, or stop it."
        raise ConfigError(Problem("run.dir", text))


def _at_path(config: Config, folder: Path, holds_run: bool, verify: Verify) -> tuple[Checkpoint, tuple[Damage, ...]]:
    path = Path(str(config.resume)).expanduser().absolute()
    if any(same_folder(each, folder) for each in (path, *path.parents)):
        verify = with_records(config, verify)
    found, passed_over = checkpoint_at(path, verify)
    if found is None:
        text = f"{path} holds no checkpoint. Give a .../checkpoints/step=N folder, a run's folder, auto, or null."
        raise ConfigError(Problem("resume", text))
    checkpoint, origin = found, found.run_folder
    try:
        summary_of(origin)  # what it says of the run's first part is kept
    except ValueError as error:
        raise ConfigError(Problem("resume", f"{error}. Remove that file to go on without what it says.")) from error
    if holds_run and not same_folder(origin, folder):
        text = f"{folder} holds another run than the checkpoint's ({origin}). Choose another run.dir, or that one."
        raise ConfigError(Problem("run.dir", text))
    _must_match(config, origin, checkpoint)
    return checkpoint, passed_over


def checkpoint_at(path: Path, verify: Verify) -> tuple[Checkpoint | None, tuple[Damage, ...]]:
    """Return the checkpoint that `path` is, or the newest of the run whose folder it is; and what was passed over.

    Raises:
        ConfigError: it is damaged or another run's, or all of them are.
    """
    verify = of_its_run(verify)
    if (path.name.startswith("step=") and path.is_dir()) or (path / MANIFEST).is_file():
        return verified(path, verify), ()
    return newest_verified(path / "checkpoints", verify)


def _must_match(config: Config, folder: Path, checkpoint: Checkpoint | None) -> None:
    """Raise ConfigError where the run of `folder` was another, or its config.yaml was changed since `checkpoint`.

    spikes.policy may change as long as it had nothing to decide: until then, the run was the same under any.
    """
    file = folder / "config.yaml"
    try:
        old = load_config(file, [])
    except ConfigError as error:
        text = f"{file} cannot be read, so nothing says what its run was: {error.problems[0].text}"
        raise ConfigError(Problem("resume", text)) from error
    differences = differences_on_resume(old, config)
    if known_summary(folder).get(INIT) and None not in differences.get("model.init_from", (None,)):
        del differences["model.init_from"]  # the weights' content is held against it wherever they lie now,
        differences.pop("model.name", None)  # under whatever name, which may be the folder's
    if known_summary(folder).get(DISTIL) and None not in differences.get(TEACHERS, (None,)):
        del differences[TEACHERS]  # so is the teachers'
    if known_summary(folder).get("data_hash"):  # which is held against the data wherever they lie now
        differences = {key: values for key, values in differences.items() if not is_data_path(key)}
    if checkpoint is None or not checkpoint.events:
        differences.pop(POLICY, None)
    problems = []
    if checkpoint is not None:
        changed = changed_since(checkpoint, old)
        problems += [Problem(key, edited_text(file, checkpoint, *values)) for key, values in changed.items()]
        differences = {key: values for key, values in differences.items() if key not in changed}
    problems += [
        Problem(key, f"is {new!r}, and {before!r} in the run of {folder}. Set it back, or start a new run.")
        for key, (before, new) in differences.items()
    ]
    if problems:
        raise ConfigError(problems)
