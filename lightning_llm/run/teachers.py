"""Teachers of a run: opened, the same on all ranks, known in its summary by the digests of their content."""

from pathlib import Path
from typing import Any

import torch

from lightning_llm.base.errors import AgreedError, ConfigError, Problem
from lightning_llm.config.schema import Config
from lightning_llm.data.tokens.tokenizer import Tokenizer
from lightning_llm.model.dtypes import DTYPES
from lightning_llm.model.ensemble import Ensemble
from lightning_llm.model.weights.convert import state_dict_of
from lightning_llm.model.weights.folder import Weights
from lightning_llm.model.weights.load import frozen_decoder
from lightning_llm.plan.teachers import KEY, teacher_differences
from lightning_llm.run.launch.environment import is_first_rank
from lightning_llm.run.inputs import agreed_weights
from lightning_llm.run.resume.start import DISTIL, Start
from lightning_llm.tracking.files import summary_of
from lightning_llm.train.distillation import Distillation


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
        weights, digest = agreed_weights(path, KEY, lambda found: _differences(found, config, tokenizer))
        checkpoint = getattr(weights, "checkpoint", None)
        step = None if checkpoint is None else checkpoint.step
        facts.append({"path": str(weights.path), "kind": weights.kind, "step": step, "digest": digest})
        try:
            state = state_dict_of(weights)
        except ConfigError as error:  # of the same files on every rank
            raise AgreedError(error.problems) from error
        decoders.append(frozen_decoder(weights.config, state, DTYPES[config.precision.compute_dtype], device))
        if is_first_rank():
            print(f"teacher {weights.path} ({weights.kind}, digest {digest[:8]})", flush=True)
    _check_known(start, [str(each["digest"]) for each in facts])
    teachers = Ensemble.of(decoders, distil.combine)
    return Distillation(distil, teachers, config.model.vocab_size), {DISTIL: facts}


def _differences(weights: Weights, config: Config, tokenizer: Tokenizer) -> list[Problem]:
    problems = list(teacher_differences(str(weights.path), weights.config, config))
    own = weights.tokenizer
    if own is None:
        problems.append(Problem(KEY, f"{weights.path} has no tokenizer.json: nothing says what tokens it predicts."))
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
        problems.append(Problem(KEY, text))
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
        raise AgreedError(Problem(KEY, text))
