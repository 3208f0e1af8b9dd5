"""Agreement of ranks before they train: one config, one way to run its casts, the same data, one shared folder."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from lightning_llm.base.errors import AgreedError, ConfigError, Problem
from lightning_llm.config.schema import Config
from lightning_llm.config.weight_folders import TOKENIZER
from lightning_llm.config.workspace import same_folder
from lightning_llm.config.yaml_file import write_config
from lightning_llm.data.corpus import Corpus
from lightning_llm.parallel.process_group import gather_objects, object_of_first
from lightning_llm.plan.resolve import Plan
from lightning_llm.run.launch.environment import is_first_rank
from lightning_llm.run.launch.lock import lock_made_folder
from lightning_llm.run.resume.rollback import Rollback, write_rollbacks
from lightning_llm.run.resume.start import Start
from lightning_llm.tracking.rank_liveness import clear_beats


class RankReport(NamedTuple):
    """What one rank says of itself. `runs`: how casts would run there; `compiled`: whether blocks would be;
    `problems`: what it refuses."""

    devices: int
    config_hash: str
    runs: str
    compiled: bool
    problems: tuple[Problem, ...]


def agree_on_plan(plan: Plan, refusal: ConfigError | None = None) -> Plan:
    """Return the plan with rank 0's config: of those composed apart, names made of the time may differ. Collective.

    `refusal` is why this rank cannot train.

    Raises:
        ConfigError: on every rank, with what any refuses; or where one was started with something else, or would run
            casts otherwise than rank 0.
    """
    if not dist.is_initialized():
        if refusal is not None:
            raise refusal
        return plan
    problems = () if refusal is None else tuple(refusal.problems)
    here = RankReport(plan.config.trainer.devices, plan.identity, plan.decision.runs, plan.compiled, problems)
    found = gather_objects(here)
    if refused := _of_ranks([each.problems for each in found]):
        raise AgreedError(refused)
    if len({each.devices for each in found}) > 1:
        devices = sorted({each.devices for each in found})
        text = f"ranks per machine are {', '.join(map(str, devices))}. Start as many on each."
        raise AgreedError(Problem("trainer.devices", text))
    if others := [rank for rank, each in enumerate(found) if each.config_hash != found[0].config_hash]:
        text = f"of rank(s) {_listed(others)} differs from rank 0's. Start all with the same words."
        raise AgreedError(Problem("the config", text))
    if others := [rank for rank, each in enumerate(found) if each.runs != found[0].runs]:
        text = (
            f"casts would be {found[0].runs} on rank 0 and {found[others[0]].runs} on rank(s) {_listed(others)}. Set "
            "emulated, or start all ranks on machines that are alike."
        )
        raise AgreedError(Problem("precision.backend", text))
    if others := [rank for rank, each in enumerate(found) if each.compiled != found[0].compiled]:
        compiled, not_compiled = ("rank 0", f"rank(s) {_listed(others)}")[:: 1 if found[0].compiled else -1]
        text = f"blocks would be compiled on {compiled} and not on {not_compiled}. Set true or false."
        raise AgreedError(Problem("parallel.compile", text))
    return replace(plan, config=object_of_first(plan.config))


def agree_on_data(fingerprint: str, start: Start) -> None:
    """Return quietly where all ranks have the same data, and those of the steps before `start`. Collective.

    Raises:
        AgreedError: on every rank.
    """
    found = gather_objects(fingerprint)
    if others := [rank for rank, each in enumerate(found) if each != found[0]]:
        text = f"are others on rank(s) {_listed(others)} than on rank 0. Give every node the same files."
        raise AgreedError(Problem("data", text))
    if start.checkpoint is not None and start.data_hash not in (None, fingerprint):
        text = (
            f"are not those that {start.checkpoint.folder} was trained on (data_hash {fingerprint[:8]}, and "
            f"{str(start.data_hash)[:8]} then): text, tokenizer or held-out documents changed. Bring them back as they "
            "were, or start a new run."
        )
        raise AgreedError(Problem("data", text))


def agree_on_inputs(names: Mapping[str, str], refusal: ConfigError | None) -> None:
    """Return quietly where all ranks see the same: `names` say of each input what lies there, digests say. Collective.

    `refusal` is what this rank finds wrong.

    Raises:
        AgreedError: on every rank.
    """
    here = tuple(refusal.problems) if refusal is not None else (), dict(names)
    found = gather_objects(here)
    if refused := _of_ranks([problems for problems, _ in found]):
        raise AgreedError(refused)
    first = found[0][1]
    text = "are others on rank(s) {} than on rank 0. Give every node the same files."
    others = {key: [rank for rank, (_, its) in enumerate(found) if its[key] != name] for key, name in first.items()}
    if problems := [Problem(key, text.format(_listed(ranks))) for key, ranks in others.items() if ranks]:
        raise AgreedError(problems)


def _of_ranks(problems: list[tuple[Problem, ...]]) -> list[Problem]:
    """Return each rank's problems once, with the ranks that have it where not all do."""
    found: dict[Problem, list[int]] = {}
    for rank, its in enumerate(problems):
        for each in dict.fromkeys(its):
            found.setdefault(each, []).append(rank)
    return [
        each if len(ranks) == len(problems) else Problem(each.key, f"on rank(s) {_listed(ranks)} {each.text}")
        for each, ranks in found.items()
    ]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


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
        dist.barrier()
        seen = gather_objects(((folder / "config.yaml").is_file(), problem))
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
