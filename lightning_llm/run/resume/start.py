"""Start of a run, decided by the content of run.dir: begin, resume, branch, or nothing left to do. Imports no torch."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.branching import changed_keys
from lightning_llm.config.config_hash import below, differences_on_resume, is_data_path
from lightning_llm.config.from_file import load_config
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import how_to_extend, same_folder
from lightning_llm.run.resume.rollback import Rollback, read_rollbacks, with_same_samples
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.run_state import settled_state, state_of, whose
from lightning_llm.train.checkpoint.manifest import MANIFEST, Checkpoint, Damage, RunIdentity
from lightning_llm.train.checkpoint.verification import (
    POLICY,
    Verify,
    changed_since,
    config_of_run,
    edited_text,
    known_summary,
    newest_verified,
    of_its_run,
    verified,
    with_records,
)

LEARNED = ("data.max_tokens", "data.sources.", "data.mixture.", "data.tokenizer.", "data.validation.")
"""Keys that `data_hash` depends on."""
INIT = "init"
"""Key of summary.json with the weights that the run started from."""
DISTIL, TEACHERS = "distil", "distil.teachers"
"""Key of summary.json with the teachers, and config key with their paths."""


@dataclass(frozen=True)
class Start:
    """Start of a run: at step 0, from a checkpoint, or finished.

    Args:
        checkpoint: the checkpoint to start from; None: start at step 0.
        finished: nothing is left to do.
        made_steps: number of steps of a finished run without checkpoints.
        ended: callback that ended the run before its last step, and its reason.
        skipped: newer checkpoints that are damaged or from another run.
        run: identity written into checkpoints saved from now on.
        data_hash: hash of the data of the previous steps, if known and still required.
        parent: config of the parent run, if the run branches here.
        rollbacks: rollbacks in the previous steps.
    """

    checkpoint: Checkpoint | None = None
    finished: bool = False
    made_steps: int = 0
    ended: str = ""
    skipped: tuple[Damage, ...] = ()
    run: RunIdentity = field(default_factory=RunIdentity.new, compare=False)
    data_hash: str | None = None
    parent: Config | None = None
    rollbacks: tuple[Rollback, ...] = ()

    @property
    def step(self) -> int:
        """Number of optimizer steps before the start."""
        return self.checkpoint.step if self.checkpoint else self.made_steps

    def changes_optimizer(self, config: Config) -> bool:
        """Return whether the run branches from a parent run with other options of the optimizer."""
        parent = self.parent
        if parent is None:
            return False
        return (config.optim, config.precision.optimizer) != (parent.optim, parent.precision.optimizer)

    def nothing_left(self, config: Config) -> str:
        """Return the message about a finished run and how to continue it."""
        if self.ended:
            return (
                f"{config.run.dir} is finished at step {self.step} of {config.trainer.max_steps}: {self.ended}. "
                "To continue, remove or reconfigure that callback"
            )
        return how_to_extend(config.run.dir, self.step)


def sizes_alone(checkpoint: Checkpoint) -> list[Damage]:
    """Return [] for any checkpoint: skips the verification of contents, before the ranks verify them together.

    Opening a checkpoint has checked the sizes of its files.
    """
    return []


def decide_start(config: Config, verify: Verify = sizes_alone) -> Start:
    """Return how this run starts, including previous rollbacks. Changes nothing; see `_decide`.

    Raises:
        ConfigError: as `_decide`, or the file of rollbacks is damaged.
    """
    start = _decide(config, with_same_samples(config, verify))
    if start.checkpoint is not None:
        return replace(start, rollbacks=read_rollbacks(start.checkpoint.run_folder))
    return replace(start, rollbacks=read_rollbacks(Path(config.run.dir))) if config.resume is not None else start


def _decide(config: Config, verify: Verify) -> Start:
    """Return how this run starts. Changes nothing.

    A new run begins at step 0 or, with `branch_from`, at a checkpoint of its parent run. `resume=null` needs a folder
    without a run. `resume=auto` resumes from the newest checkpoint in the folder that passes `verify`, or begins if
    there is none. `resume=PATH` resumes from that checkpoint, or from the newest one of that run, in its own folder or
    in a new one.

    Raises:
        ConfigError: the folder contains something else, the configs differ, or all checkpoints are damaged.
    """
    folder = Path(config.run.dir)
    holds_run = (folder / "config.yaml").is_file()
    if holds_run:
        _refuse_running(folder, wait=config.resume is not None)
    if config.resume is None:
        if folder.is_dir() and any(folder.iterdir()):
            what = "a run" if holds_run else "other files"
            text = (
                f"{folder} already contains {what}. Set resume=auto to resume, or choose another run.name or run.dir."
            )
            raise ConfigError(Problem("run.dir", text))
        return first_start(config, verify)
    if config.resume == "auto":
        if not holds_run:
            if folder.is_dir() and any(folder.iterdir()):
                text = f"{folder} contains other files than a run's. Choose another run.name or run.dir."
                raise ConfigError(Problem("run.dir", text))
            return first_start(config, verify)
        of_run = of_its_run(with_records(config, verify))
        checkpoint, skipped = newest_verified(folder / "checkpoints", of_run, _went_back(config, folder))
        _must_match(config, folder, checkpoint)
        if ended := _ended_early(config, folder):
            return Start(checkpoint, True, int(summary_of(folder)["ended_by"]["step"]), ended)
        if checkpoint is None and not skipped and state_of(folder) == "finished":
            return _finished_without_checkpoint(config, folder)
        if checkpoint is None and (origin := load_config(folder / "config.yaml", []).resume) not in (None, "auto"):
            # The run was killed before its first checkpoint, and did not start at step 0.
            begun = config.model_copy(update={"resume": origin})
            checkpoint, skipped = _at_path(begun, folder, holds_run=False, verify=verify)
    else:
        checkpoint, skipped = _at_path(config, folder, holds_run, verify)
    if checkpoint is not None and checkpoint.step > config.trainer.max_steps:
        text = f"must be at least {checkpoint.step}, the step of the checkpoint. Raise it."
        raise ConfigError(Problem("trainer.max_steps", text, config.trainer.max_steps))
    if checkpoint is None:
        start = first_start(config, verify)
        return replace(start, skipped=(*skipped, *start.skipped))
    if checkpoint.step == config.trainer.max_steps and not holds_run:
        text = f"must be above {checkpoint.step}, the step of the checkpoint, for a new folder. Raise it."
        raise ConfigError(Problem("trainer.max_steps", text, config.trainer.max_steps))
    done = checkpoint.step >= config.trainer.max_steps and state_of(folder) == "finished"
    run, data_hash = _identity(checkpoint, folder), summary_of(checkpoint.run_folder).get("data_hash")
    return Start(checkpoint, done, skipped=skipped, run=run, data_hash=data_hash)


def first_start(config: Config, verify: Verify) -> Start:
    """Return the start of a new run: step 0, or the checkpoint of its parent run."""
    if config.branch_from is None:
        return Start()
    checkpoint, skipped = checkpoint_at(Path(config.branch_from), verify)
    if checkpoint is None:
        text = f"{config.branch_from} contains no checkpoint. Give a run's folder or .../checkpoints/step=N."
        raise ConfigError(Problem("branch_from", text))
    parent = config_of_run(checkpoint)
    same_data = not any(below(key, LEARNED) and not is_data_path(key) for key in changed_keys(parent, config))
    data_hash = summary_of(checkpoint.run_folder).get("data_hash") if same_data else None
    run = RunIdentity.new(begun_at_step=checkpoint.step)
    return Start(checkpoint, skipped=skipped, run=run, data_hash=data_hash, parent=parent)


def _identity(checkpoint: Checkpoint, folder: Path) -> RunIdentity:
    """Return the identity of the run in `folder` after `checkpoint`: that of its run, or a new one in a new folder."""
    if not same_folder(checkpoint.run_folder, folder):
        return RunIdentity.new(begun_at_step=checkpoint.step)
    known = RunIdentity.from_summary(summary_of(folder))
    return known or RunIdentity(checkpoint.run_id or RunIdentity.new().id, begun_at_step=None)


def _ended_early(config: Config, folder: Path) -> str:
    """Return the callback that ended the run early and its reason; "" if none did, or its settings have changed."""
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
    """Return whether rollbacks, rather than a changed data.skip_samples, may have left no usable checkpoint."""
    if not read_rollbacks(folder):
        return False
    return load_config(folder / "config.yaml", []).data.skip_samples == config.data.skip_samples


def _finished_without_checkpoint(config: Config, folder: Path) -> Start:
    """Return a `Start` with nothing left to do: a new start would delete the finished run.

    Raises:
        ConfigError: trainer.max_steps has changed.
    """
    steps = load_config(folder / "config.yaml", []).trainer.max_steps
    if config.trainer.max_steps != steps:
        text = (
            f"{folder} is finished at step {steps} and its checkpoints were deleted, so it cannot continue to "
            f"trainer.max_steps={config.trainer.max_steps}. Choose another run.name, or restore them."
        )
        raise ConfigError(Problem("resume", text))
    return Start(None, finished=True, made_steps=steps)


def _refuse_running(folder: Path, wait: bool) -> None:
    """Raise ConfigError if the folder's run is in progress, or its state is unknown."""
    try:
        fingerprint = summary_of(folder).get("process", "")
    except ValueError as error:
        text = f"{error}. If no process trains there, remove the file; resume=auto then continues."
        raise ConfigError(Problem("run.dir", text)) from error
    if (settled_state(folder) if wait else state_of(folder)) == "running":
        text = f"{whose(fingerprint)} is training in {folder}. Wait, or stop it."
        raise ConfigError(Problem("run.dir", text))


def _at_path(config: Config, folder: Path, holds_run: bool, verify: Verify) -> tuple[Checkpoint, tuple[Damage, ...]]:
    path = Path(str(config.resume)).expanduser().absolute()
    if any(same_folder(each, folder) for each in (path, *path.parents)):
        verify = with_records(config, verify)
    found, skipped = checkpoint_at(path, verify)
    if found is None:
        text = f"{path} contains no checkpoint. Give a .../checkpoints/step=N folder, a run's folder, auto, or null."
        raise ConfigError(Problem("resume", text))
    checkpoint, origin = found, found.run_folder
    try:
        summary_of(origin)  # its facts about previous sessions are kept
    except ValueError as error:
        text = f"{error}. Restore the file, or remove it to resume without the history of previous sessions."
        raise ConfigError(Problem("resume", text)) from error
    if holds_run and not same_folder(origin, folder):
        text = f"{folder} contains a run, but the checkpoint is from {origin}. Choose another run.dir, or that one."
        raise ConfigError(Problem("run.dir", text))
    _must_match(config, origin, checkpoint)
    return checkpoint, skipped


def checkpoint_at(path: Path, verify: Verify) -> tuple[Checkpoint | None, tuple[Damage, ...]]:
    """Return the checkpoint at `path`, or the newest of the run at `path`, and the skipped checkpoints.

    Raises:
        ConfigError: it is damaged or from another run, or all of them are.
    """
    verify = of_its_run(verify)
    if (path.name.startswith("step=") and path.is_dir()) or (path / MANIFEST).is_file():
        return verified(path, verify), ()
    return newest_verified(path / "checkpoints", verify)


def _must_match(config: Config, folder: Path, checkpoint: Checkpoint | None) -> None:
    """Raise ConfigError if the config does not match the run in `folder`, or config.yaml changed since `checkpoint`.

    spikes.policy may change before the first spike, since it has had no effect until then.
    """
    file = folder / "config.yaml"
    try:
        old = load_config(file, [])
    except ConfigError as error:
        text = f"{file} cannot be read: {error.problems[0].text}"
        raise ConfigError(Problem("resume", text)) from error
    differences = differences_on_resume(old, config)
    if known_summary(folder).get(INIT) and None not in differences.get("model.init_from", (None,)):
        del differences["model.init_from"]  # the weights' content is compared instead of the path
        differences.pop("model.name", None)  # may be the folder's name
    if known_summary(folder).get(DISTIL) and None not in differences.get(TEACHERS, (None,)):
        del differences[TEACHERS]  # the same for teachers
    if known_summary(folder).get("data_hash"):  # compared with the data instead of their paths
        differences = {key: values for key, values in differences.items() if not is_data_path(key)}
    if checkpoint is None or not checkpoint.events:
        differences.pop(POLICY, None)
    problems = []
    if checkpoint is not None:
        changed = changed_since(checkpoint, old)
        problems += [Problem(key, edited_text(file, checkpoint, *values)) for key, values in changed.items()]
        differences = {key: values for key, values in differences.items() if key not in changed}
    problems += [
        Problem(key, f"is {new!r}, but {before!r} in the run in {folder}. Set it back, or start a new run.")
        for key, (before, new) in differences.items()
    ]
    if problems:
        raise ConfigError(problems)
