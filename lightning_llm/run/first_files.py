"""What a run writes into its folder first, so that every rank sees it: config.yaml, the tokenizer, rollbacks."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from lightning_llm.base.errors import AgreedError, Problem
from lightning_llm.config.schema import Config
from lightning_llm.config.weight_folders import TOKENIZER
from lightning_llm.config.workspace import same_folder
from lightning_llm.config.yaml_file import write_config
from lightning_llm.data.corpus import Corpus
from lightning_llm.run.launch.environment import is_first_rank
from lightning_llm.run.launch.lock import lock_made_folder
from lightning_llm.run.resume.rollbacks import Rollback, write_rollbacks
from lightning_llm.run.resume.start import Start
from lightning_llm.tracking.rank_liveness import clear_beats


def prepare_folder(config: Config, corpus: Corpus, start: Start) -> Callable[[], None] | None:
    """Make the run's folder with config.yaml and tokenizer.json. Collective.

    Where the run goes on in its folder, what lies there stays as it is: returned is what writes these files, to be
    called on rank 0 when `start` has loaded on every rank.

    Raises:
        ConfigError: on every rank, where rank 0 cannot write it, or one does not see rank 0's folder.
    """
    folder = Path(config.run.dir)
    goes_on = start.checkpoint is not None and same_folder(start.checkpoint.run_folder, folder)
    if start.checkpoint is not None and start.trunk is None and not goes_on:
        # Until it has saved its own start it begins there, if killed too. Of a branch branch_from says where.
        config = config.model_copy(update={"resume": str(start.checkpoint.folder)})
    rollbacks = () if goes_on else start.rollbacks
    write = partial(_write_first, config, corpus, rollbacks)
    problem = None
    if is_first_rank() and not goes_on:
        problem = _made(folder, write) or lock_made_folder(folder)
    if is_first_rank():
        clear_beats(folder)
    if dist.is_initialized():
        seen: list[tuple[bool, Problem | None]] = [(False, None)] * dist.get_world_size()
        dist.barrier()
        dist.all_gather_object(seen, ((folder / "config.yaml").is_file(), problem))
        problem = seen[0][1]
        if problem is None and not all(sees for sees, _ in seen):
            blind = ", ".join(str(rank) for rank, (sees, _) in enumerate(seen) if not sees)
            text = f"{folder} is not seen by rank(s) {blind}. Set run.root to storage that all nodes share."
            problem = Problem("run.dir", text)
    if problem:
        raise AgreedError(problem)
    return write if goes_on else None


def _made(folder: Path, write: Callable[[], None]) -> Problem | None:
    """Make `folder` and `write` into it; where that fails, leave nothing behind and return why."""
    before = set(folder.iterdir()) if folder.is_dir() else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        with suppress(OSError):
            for left in set(folder.iterdir()) - (before or set()):
                left.unlink()
            if before is None:
                folder.rmdir()
        text = f"{folder} cannot be written ({error.strerror or error}). Make room there, or choose another run.root."
        return Problem("run.dir", text)
    return None


def _write_first(config: Config, corpus: Corpus, rollbacks: Sequence[Rollback]) -> None:
    folder = Path(config.run.dir)
    if rollbacks:
        write_rollbacks(folder, rollbacks)
    write_config(config, folder / "config.yaml")
    written = corpus.tokenizer.save(folder / f"{TOKENIZER}.partial")
    written.rename(folder / TOKENIZER)
    corpus.tokenizer.declare_end(folder)
