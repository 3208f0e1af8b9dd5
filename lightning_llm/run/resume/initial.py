"""What a run at step 0 starts from: the weights at `model.init_from`, the same on all ranks, or nothing."""

from pathlib import Path
from typing import Any

from lightning_llm.base.errors import AgreedError, ConfigError, Problem
from lightning_llm.config.schema import Config
from lightning_llm.config.weight_folders import KEY
from lightning_llm.model.weights.folder import Weights
from lightning_llm.model.weights.load import InitialWeights
from lightning_llm.run.launch.environment import is_first_rank
from lightning_llm.run.inputs import agreed_weights
from lightning_llm.run.resume.start import INIT, Start
from lightning_llm.run.resume.weights import init_problems, length_note, pieces_of_new_tokens
from lightning_llm.tracking.files import summary_of


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
    weights, digest = agreed_weights(str(config.model.init_from), KEY, lambda _: init_problems(config))
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
    _say(config, weights, facts)
    without = sum(not pieces for pieces in initial.pieces.values())
    if without and is_first_rank():
        text = "have no pieces in the weights' vocabulary: their rows are the mean of all rows"
        print(f"note   {without:,} of the new tokens {text}", flush=True)
    return initial, {INIT: facts}


def _check_same(config: Config, known: dict[str, Any]) -> None:
    """Raise AgreedError where the weights at another path are not those that the run began with."""
    weights, digest = agreed_weights(str(config.model.init_from), KEY, lambda _: init_problems(config))
    if digest != known.get("digest"):
        text = (
            f"is {weights.path}, whose content (digest {digest[:8]}) is not that of {known.get('path')}, which the run "
            f"started from ({str(known.get('digest'))[:8]}). Set it back, or start a new run."
        )
        raise AgreedError(Problem(KEY, text))


def _say(config: Config, weights: Weights, facts: dict[str, Any]) -> None:
    if not is_first_rank():
        return
    named = f", {facts['architecture']}" if facts["architecture"] else ""
    added = f", {facts['new_tokens']:,} new tokens" if facts["new_tokens"] else ""
    print(f"init   {weights.path} ({weights.kind}{named}, digest {facts['digest'][:8]}{added})", flush=True)
    for note in filter(None, (length_note(config, weights), *weights.notes)):
        print(note, flush=True)
    if weights.tokenizer is None:
        print("note   the weights bring no tokenizer.json: nothing says that data.tokenizer is theirs", flush=True)
