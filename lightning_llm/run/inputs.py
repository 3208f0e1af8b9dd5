"""Inputs of a run: data, weights at `model.init_from`, teachers. Digests verify that they are equal on all ranks."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_llm.base.errors import AgreedError, ConfigError, Problem
from lightning_llm.config.schema import Config
from lightning_llm.config.weight_folders import INIT_FROM, weights_path
from lightning_llm.data.corpus import Corpus
from lightning_llm.data.opening import open_corpus
from lightning_llm.data.report import account_lines, chosen_lines, data_line, phase_lines
from lightning_llm.data.tokens.tokenizer import Tokenizer
from lightning_llm.linalg import DTYPES
from lightning_llm.model.ensemble import Ensemble
from lightning_llm.model.weights.folder import Weights, digest_of
from lightning_llm.model.weights.load import InitialWeights, frozen_decoder, state_dict_of
from lightning_llm.parallel.process_group import gather_objects
from lightning_llm.plan.teachers import KEY as TEACHERS
from lightning_llm.plan.teachers import teacher_differences
from lightning_llm.run.launch.environment import is_first_rank, print_once
from lightning_llm.run.opening import listed, problems_of_ranks
from lightning_llm.run.resume.branch import check_branch_tokenizer
from lightning_llm.run.resume.rollback import skipped_samples
from lightning_llm.run.resume.start import DISTIL, INIT, Start
from lightning_llm.run.resume.weights import init_problems, length_note, open_weights, pieces_of_new_tokens
from lightning_llm.tracking.files import summary_of
from lightning_llm.train.distillation import Distillation


class Inputs(NamedTuple):
    """Data and weights that a run reads before its first step, the same on all ranks."""

    corpus: Corpus
    initial: InitialWeights | None
    """Weights of `model.init_from`; None if weights come from the seed or a checkpoint."""
    distillation: Distillation | None
    """Teachers of `distil`; None without."""
    facts: dict[str, Any]
    """Facts about initial weights and teachers, for summary.json."""


def open_inputs(config: Config, start: Start, device: torch.device) -> Inputs:
    """Open and print the data, the initial weights and the teachers of a run. Collective.

    Raises:
        ConfigError: on every rank, if a rank cannot read them, ranks see different ones, or they changed since the
            steps before `start`.
    """
    skipped = skipped_samples(config, start.rollbacks)
    data = config.data.model_copy(update={"skip_samples": skipped or None})
    corpus = open_corpus(data, config.seed, config.model.vocab_size, config.trainer.max_steps, progress=is_first_rank())
    more = (*phase_lines(config, corpus), *chosen_lines(corpus), *account_lines(corpus))
    for line in (data_line(config, corpus), *more):
        print_once(line)
    agree_on_data(corpus.fingerprint, start)
    check_branch_tokenizer(start, corpus.tokenizer.path)
    initial, init_facts = open_initial(config, start, corpus.tokenizer.path)
    distillation, teacher_facts = open_teachers(config, start, corpus.tokenizer, device)
    return Inputs(corpus, initial, distillation, init_facts | teacher_facts)


def agree_on_data(fingerprint: str, start: Start) -> None:
    """Verify that all ranks have the same data, and that it is unchanged since the checkpoint of `start`. Collective.

    Raises:
        AgreedError: on every rank, if the data differ between ranks or from the checkpoint's.
    """
    found = gather_objects(fingerprint)
    if others := [rank for rank, each in enumerate(found) if each != found[0]]:
        text = f"differ on rank(s) {listed(others)} from rank 0. Give every node the same files."
        raise AgreedError(Problem("data", text))
    if start.checkpoint is not None and start.data_hash not in (None, fingerprint):
        text = (
            f"changed since {start.checkpoint.folder} was trained (data_hash {str(start.data_hash)[:8]} -> "
            f"{fingerprint[:8]}): text, tokenizer or held-out documents. Restore them, or start a new run."
        )
        raise AgreedError(Problem("data", text))


def agree_on_inputs(names: Mapping[str, str], refusal: ConfigError | None) -> None:
    """Verify that all ranks see the same inputs. Collective.

    `names`: {config key: name and digest of the input on this rank}, with the same keys on all ranks. `refusal`: the
    problems that this rank has found, or None.

    Raises:
        AgreedError: on every rank, if a rank has a problem or inputs differ.
    """
    here = tuple(refusal.problems) if refusal is not None else (), dict(names)
    found = gather_objects(here)
    if refused := problems_of_ranks([problems for problems, _ in found]):
        raise AgreedError(refused)
    first = found[0][1]
    text = "differ on rank(s) {} from rank 0. Give every node the same files."
    others = {key: [rank for rank, (_, its) in enumerate(found) if its[key] != name] for key, name in first.items()}
    if problems := [Problem(key, text.format(listed(ranks))) for key, ranks in others.items() if ranks]:
        raise AgreedError(problems)


def open_initial(config: Config, start: Start, tokenizer: Path) -> tuple[InitialWeights | None, dict[str, Any]]:
    """Return the initial weights and the facts about them for the summary. Every file is read once, for its digest.

    Facts under "init": `named` and the resolved `path`, `kind`, `architecture`, `digest` of the content, `new_tokens`.
    A resumed run takes its weights from the checkpoint; if model.init_from is another path now, its content must be
    the same. Collective.

    Raises:
        ConfigError: on every rank, if a rank finds a problem, or ranks see different weights.
    """
    if config.model.init_from is None:
        return None, {}
    if start.checkpoint is not None:
        known = summary_of(start.checkpoint.run_folder).get(INIT) or {}
        if known and known.get("named") != config.model.init_from:
            _check_same(config, known)
        return None, {INIT: known} if known else {}
    weights, digest = agreed_weights(str(config.model.init_from), INIT_FROM, lambda _: init_problems(config))
    try:
        initial = InitialWeights(weights, config.model, pieces_of_new_tokens(config, weights, tokenizer))
    except ConfigError as error:  # the same files, so the same error, on every rank
        raise AgreedError(error.problems) from error
    facts = {
        "named": config.model.init_from,
        "path": str(weights.path),
        "kind": weights.kind,
        "architecture": weights.architecture,
        "digest": digest,
        "new_tokens": len(initial.pieces),
    }
    _announce(config, weights, facts)
    without = sum(not pieces for pieces in initial.pieces.values())
    if without:
        text = "cannot be split into tokens of the weights' vocabulary; their rows start as the mean of all rows"
        print_once(f"note   {without:,} of the new tokens {text}")
    return initial, {INIT: facts}


def _check_same(config: Config, known: dict[str, Any]) -> None:
    """Raise AgreedError if the weights at another path are not those that the run started from."""
    weights, digest = agreed_weights(str(config.model.init_from), INIT_FROM, lambda _: init_problems(config))
    if digest != known.get("digest"):
        text = (
            f"is {weights.path} (digest {digest[:8]}), but the run started from {known.get('path')} (digest "
            f"{str(known.get('digest'))[:8]}). Set it back, or start a new run."
        )
        raise AgreedError(Problem(INIT_FROM, text))


def _announce(config: Config, weights: Weights, facts: dict[str, Any]) -> None:
    named = f", {facts['architecture']}" if facts["architecture"] else ""
    added = f", {facts['new_tokens']:,} new tokens" if facts["new_tokens"] else ""
    print_once(f"init   {weights.path} ({weights.kind}{named}, digest {facts['digest'][:8]}{added})")
    for note in filter(None, (length_note(config, weights), *weights.notes)):
        print_once(note)
    if weights.tokenizer is None:
        print_once("note   the weights have no tokenizer.json: cannot verify that data.tokenizer is their tokenizer")


def open_teachers(
    config: Config, start: Start, tokenizer: Tokenizer, device: torch.device
) -> tuple[Distillation | None, dict[str, Any]]:
    """Return the teachers on `device` and the facts about them for the summary. Collective.

    Facts under "distil": `path`, `kind`, `step` and `digest` of each teacher. Teachers are not quantized; they compute
    in the student's compute dtype.

    Raises:
        ConfigError: on every rank, if weights cannot be read, predict other tokens, or changed since the steps before
            `start`.
    """
    distil = config.distil
    if distil is None:
        return None, {}
    facts, decoders = [], []
    for path in distil.teachers:
        weights, digest = agreed_weights(path, TEACHERS, lambda found: _differences(found, config, tokenizer))
        checkpoint = getattr(weights, "checkpoint", None)
        step = None if checkpoint is None else checkpoint.step
        facts.append({"path": str(weights.path), "kind": weights.kind, "step": step, "digest": digest})
        try:
            state = state_dict_of(weights)
        except ConfigError as error:  # the same files, so the same error, on every rank
            raise AgreedError(error.problems) from error
        decoders.append(frozen_decoder(weights.config, state, DTYPES[config.precision.compute_dtype], device))
        print_once(f"teacher {weights.path} ({weights.kind}, digest {digest[:8]})")
    _check_known(start, [str(each["digest"]) for each in facts])
    teachers = Ensemble.from_members(decoders, distil.combine)
    return Distillation(distil, teachers, config.model.vocab_size), {DISTIL: facts}


def _differences(weights: Weights, config: Config, tokenizer: Tokenizer) -> list[Problem]:
    problems = list(teacher_differences(str(weights.path), weights.config, config))
    own = weights.tokenizer
    if own is None:
        problems.append(
            Problem(TEACHERS, f"{weights.path} has no tokenizer.json, so its vocabulary is unknown. Add the file.")
        )
        return problems
    try:
        same = Tokenizer(own, config.data.tokenizer.end_of_document).fingerprint == tokenizer.fingerprint
    except (OSError, ValueError) as error:
        return [*problems, Problem(str(own), f"{error}.")]
    if not same:
        text = (
            f"{weights.path} has a different tokenizer than the run. Use the teacher's: "
            f"data.tokenizer.kind=file data.tokenizer.path={own} data.tokenizer.vocab_size=null."
        )
        problems.append(Problem(TEACHERS, text))
    return problems


def _check_known(start: Start, digests: list[str]) -> None:
    """Raise AgreedError if a resumed run had other teachers before."""
    if start.checkpoint is None or start.parent is not None:
        return
    known = summary_of(Path(start.checkpoint.run_folder)).get(DISTIL)
    if known and [each.get("digest") for each in known] != digests:
        text = (
            f"weights changed since {start.checkpoint.folder} was saved. Give the same checkpoints "
            "(RUN/checkpoints/step=N), or restore them."
        )
        raise AgreedError(Problem(TEACHERS, text))


def agreed_weights(named: str, key: str, problems_of: Callable[[Weights], Iterable[Problem]]) -> tuple[Weights, str]:
    """Return the weights at `named` and the digest of their content; each rank reads its share. Collective.

    `key` is the config key with their path. `problems_of` returns the reasons why the run cannot use them.

    Raises:
        AgreedError: a rank finds a problem with them, or ranks see different files.
    """
    weights, problems = None, []
    digests: dict[str, str] = {}
    try:
        weights = open_weights(weights_path(named))
        problems = list(problems_of(weights))  # they may have changed since the first check, or differ on this machine
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        digests = weights.digests(rank, world)
    except ConfigError as error:
        problems = list(error.problems)
    except OSError as error:
        problems = [Problem(key, f"cannot be read: {error}. Make the files readable on every machine.")]
    sizes = {} if weights is None else {file.name: file.stat().st_size for file in weights.files()}
    found = gather_objects((problems, sizes, digests))
    if refused := dict.fromkeys(problem for problems, _, _ in found for problem in problems):
        raise AgreedError(list(refused))
    if others := [str(rank) for rank, (_, sizes, _) in enumerate(found) if sizes != found[0][1]]:
        text = f"files on rank(s) {', '.join(others)} differ from rank 0. Give every node the same folder."
        raise AgreedError(Problem(key, text))
    if weights is None:
        raise RuntimeError("this rank has no weights, but no rank reported a problem")
    return weights, digest_of({name: digest for _, _, its in found for name, digest in its.items()})
