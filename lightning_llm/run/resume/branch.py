"""A branch: a run that goes on from a trunk's checkpoint with keys changed on purpose. Imports no torch.

What it may not change is refused here; from which checkpoint it goes on `decide_start` decides, as for any other run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import AgreedError, ConfigError, Problem
from lightning_llm.base.integrity import digest_of_file
from lightning_llm.config.branching import KEY, changed_keys
from lightning_llm.config.schema import Config
from lightning_llm.config.weight_folders import TOKENIZER
from lightning_llm.data.tokens.tokenizer import tokenizer_file
from lightning_llm.run.resume.own_checkpoints import config_of_run
from lightning_llm.run.resume.start import Start
from lightning_llm.run.resume.trunk import look_once, trunk_checkpoint
from lightning_llm.run.resume.weights import begins_anew, shape_differences
from lightning_llm.tracking.files import TOKENIZER_DIGEST as TOKENIZER_DIGEST
from lightning_llm.tracking.files import summary_of
from lightning_llm.train.checkpoint.manifest import Checkpoint, step_folders, step_of

BRANCH = "branch"
"""The key of summary.json that says which trunk the run branched off, where, and what was changed."""
FIXED = {
    "data.sequence_length": "tokens and the position in the data are counted in it",
    "data.global_batch_size": "the position in the data is the number of steps times it",
    "optim.name": "each optimizer keeps a state of its own",
}
"""Keys that a branch has as its trunk, and why."""
WEIGHTS_ALONE = "Set it back; model.init_from takes the trunk's weights alone, into a run of any such key."


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
