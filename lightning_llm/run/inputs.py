"""Inputs of a run, the same on all ranks: data, weights at `model.init_from`, teachers; each known by a digest."""

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
from lightning_llm.model.dtypes import DTYPES
from lightning_llm.model.ensemble import Ensemble
from lightning_llm.model.weights.folder import Weights, digest_of
from lightning_llm.model.weights.load import InitialWeights, frozen_decoder, state_dict_of
from lightning_llm.parallel.process_group import gather_objects
from lightning_llm.plan.teachers import KEY as TEACHERS
from lightning_llm.plan.teachers import teacher_differences
from lightning_llm.run.launch.environment import is_first_rank, say
from lightning_llm.run.opening import listed, problems_of_ranks
from lightning_llm.run.resume.branch import check_branch_tokenizer
from lightning_llm.run.resume.rollback import skipped_samples
from lightning_llm.run.resume.start import DISTIL, INIT, Start
from lightning_llm.run.resume.weights import init_problems, length_note, open_weights, pieces_of_new_tokens
from lightning_llm.tracking.files import summary_of
from lightning_llm.train.distillation import Distillation


class Inputs(NamedTuple):
    """Data and weights that a run reads before its first step, the same on all ranks.

    `initial`: None: weights come from the seed or a checkpoint. `facts`: what summary.json records of the weights.
    """

    corpus: Corpus
    initial: InitialWeights | None
    distillation: Distillation | None
    facts: dict[str, Any]


def open_inputs(config: Config, start: Start, device: torch.device) -> Inputs:
    """Open the data, the weights that a run begins with, and its teachers; print what they are. Collective.

    Raises:
        ConfigError: on every rank, where any cannot read them, ranks see different ones, or those of the steps before
            `start` were others.
    """
    skipped = skipped_samples(config, start.rollbacks)
    data = config.data.model_copy(update={"skip_samples": skipped or None})
    corpus = open_corpus(data, config.seed, config.model.vocab_size, config.trainer.max_steps, progress=is_first_rank())
    more = (*phase_lines(config, corpus), *chosen_lines(corpus), *account_lines(corpus))
    for line in (data_line(config, corpus), *more):
        say(line)
    agree_on_data(corpus.fingerprint, start)
    check_branch_tokenizer(start, corpus.tokenizer.path)
    initial, init_facts = open_initial(config, start, corpus.tokenizer.path)
    distillation, teacher_facts = open_teachers(config, start, corpus.tokenizer, device)
    return Inputs(corpus, initial, distillation, init_facts | teacher_facts)


def agree_on_data(fingerprint: str, start: Start) -> None:
    """Return quietly where all ranks have the same data, and those of the steps before `start`. Collective.

    Raises:
        AgreedError: on every rank.
    """
    found = gather_objects(fingerprint)
    if others := [rank for rank, each in enumerate(found) if each != found[0]]:
        text = f"are others on rank(s) {listed(others)} than on rank 0. Give every node the same files."
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
    if refused := problems_of_ranks([problems for problems, _ in found]):
        raise AgreedError(refused)
    first = found[0][1]
    text = "are others on rank(s) {} than on rank 0. Give every node the same files."
    others = {key: [rank for rank, (_, its) in enumerate(found) if its[key] != name] for key, name in first.items()}
    if problems := [Problem(key, text.format(listed(ranks))) for key, ranks in others.items() if ranks]:
        raise AgreedError(problems)


def open_initial(config: Config, start: Start, tokenizer: Path) -> tuple[InitialWeights | None, dict[str, Any]]:
    """Return what the run starts from and what its summary is to say of it. Every file is read once, for its digest.

    `summary.json` says under "init": `named` and the `path` it led to, `kind`, `architecture`, `digest` of the content,
    `new_tokens`. A run that goes on from a checkpoint starts from that; weights named at another path must be those
    that its first part began with. Collective.

    Raises:
        ConfigError: on every rank, with what any finds wrong, or where they do not see the same weights.
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
    except ConfigError as error:  # of the same files on every rank
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
        text = "have no pieces in the weights' vocabulary: their rows are the mean of all rows"
        say(f"note   {without:,} of the new tokens {text}")
    return initial, {INIT: facts}


def _check_same(config: Config, known: dict[str, Any]) -> None:
    """Raise AgreedError where the weights at another path are not those that the run began with."""
    weights, digest = agreed_weights(str(config.model.init_from), INIT_FROM, lambda _: init_problems(config))
    if digest != known.get("digest"):
        text = (
            f"is {weights.path}, whose content (digest {digest[:8]}) is not that of {known.get('path')}, which the run "
            f"started from ({str(known.get('digest'))[:8]}). Set it back, or start a new run."
        )
        raise AgreedError(Problem(INIT_FROM, text))


def _announce(config: Config, weights: Weights, facts: dict[str, Any]) -> None:
    named = f", {facts['architecture']}" if facts["architecture"] else ""
    added = f", {facts['new_tokens']:,} new tokens" if facts["new_tokens"] else ""
    say(f"init   {weights.path} ({weights.kind}{named}, digest {facts['digest'][:8]}{added})")
    for note in filter(None, (length_note(config, weights), *weights.notes)):
        say(note)
    if weights.tokenizer is None:
        say("note   the weights bring no tokenizer.json: nothing says that data.tokenizer is theirs")


def open_teachers(
    config: Config, start: Start, tokenizer: Tokenizer, device: torch.device
) -> tuple[Distillation | None, dict[str, Any]]:
    """Return the teachers on `device`, and what the summary is to say of them: under "distil", each one's `path`,
    `kind`, `step` and `digest`. Their casts are left out: they predict in the student's compute dtype. Collective.

    Raises:
        ConfigError: on every rank, where weights cannot be read, predict other tokens, or are not those of the steps
            before `start`.
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
        except ConfigError as error:  # of the same files on every rank
            raise AgreedError(error.problems) from error
        decoders.append(frozen_decoder(weights.config, state, DTYPES[config.precision.compute_dtype], device))
        say(f"teacher {weights.path} ({weights.kind}, digest {digest[:8]})")
    _check_known(start, [str(each["digest"]) for each in facts])
    teachers = Ensemble.of(decoders, distil.combine)
    return Distillation(distil, teachers, config.model.vocab_size), {DISTIL: facts}


def _differences(weights: Weights, config: Config, tokenizer: Tokenizer) -> list[Problem]:
    problems = list(teacher_differences(str(weights.path), weights.config, config))
    own = weights.tokenizer
    if own is None:
        problems.append(
            Problem(TEACHERS, f"{weights.path} has no tokenizer.json: nothing says what tokens it predicts.")
        )
        return problems
    try:
        same = Tokenizer(own, config.data.tokenizer.end_of_document).fingerprint == tokenizer.fingerprint
    except (OSError, ValueError) as error:
        return [*problems, Problem(str(own), f"{error}.")]
    if not same:
        text = (
            f"{weights.path} has another tokenizer than the run: its tokens mean something else. Take its own: "
            f"data.tokenizer.kind=file data.tokenizer.path={own} data.tokenizer.vocab_size=null."
        )
        problems.append(Problem(TEACHERS, text))
    return problems


def _check_known(start: Start, digests: list[str]) -> None:
    """Raise AgreedError where the run goes on from steps that learned from others."""
    if start.checkpoint is None or start.trunk is not None:
        return
    known = summary_of(Path(start.checkpoint.run_folder)).get(DISTIL)
    if known and [each.get("digest") for each in known] != digests:
        text = (
            f"hold other weights than when {start.checkpoint.folder} was made. Name the checkpoints themselves "
            "(RUN/checkpoints/step=N), or bring them back."
        )
        raise AgreedError(Problem(TEACHERS, text))


def agreed_weights(named: str, key: str, problems_of: Callable[[Weights], Iterable[Problem]]) -> tuple[Weights, str]:
    """Return the weights at `named` and the digest of their whole content, of which each rank reads its share.

    `key` is the config's that names them; `problems_of` says why the run cannot use them. Collective.

    Raises:
        AgreedError: any rank finds something wrong with them, or sees other files.
    """
    weights, problems = None, []
    digests: dict[str, str] = {}
    try:
        weights = open_weights(weights_path(named))
        problems = list(problems_of(weights))  # they may have changed since the first look, or be others here
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        digests = weights.digests(rank, world)
    except ConfigError as error:
        problems = list(error.problems)
    except OSError as error:
        problems = [Problem(key, f"cannot be read: {error}.")]
    sizes = {} if weights is None else {file.name: file.stat().st_size for file in weights.files()}
    found = gather_objects((problems, sizes, digests))
    if refused := dict.fromkeys(problem for problems, _, _ in found for problem in problems):
        raise AgreedError(list(refused))
    if others := [str(rank) for rank, (_, sizes, _) in enumerate(found) if sizes != found[0][1]]:
        text = f"leads to other files on rank(s) {', '.join(others)} than on rank 0. Give every node the same folder."
        raise AgreedError(Problem(key, text))
    if weights is None:
        raise RuntimeError("no rank refuses the weights, and this one has none")
    return weights, digest_of({name: digest for _, _, its in found for name, digest in its.items()})
