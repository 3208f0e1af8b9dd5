"""What a run at step 0 starts from: the weights at `model.init_from`, the same on all ranks, or nothing."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_llm.config.from_weights import KEY, weights_path
from lightning_llm.config.schema import Config
from lightning_llm.errors import AgreedError, ConfigError, Problem
from lightning_llm.model.weights.folder import Weights, digest_of
from lightning_llm.model.weights.initial import InitialWeights
from lightning_llm.record.files import summary_of
from lightning_llm.run.environment import is_first_rank
from lightning_llm.run.start import Start
from lightning_llm.run.weights import init_problems, length_note, open_weights, pieces_of_new_tokens

FACTS = "init"
"""The key of summary.json: `path`, `kind`, `architecture`, `digest` of the content, `new_tokens`."""


def open_initial(config: Config, start: Start, tokenizer: Path) -> tuple[InitialWeights | None, dict[str, Any]]:
    """Return what the run starts from and what its summary is to say of it. Every file is read once, for its digest.

    A run that goes on from a checkpoint reads none; what its first part began with stands in that part's summary.
    Collective.

    Raises:
        ConfigError: on every rank, with what any finds wrong, or where they do not see the same weights.
    """
    if config.model.init_from is None:
        return None, {}
    if start.checkpoint is not None:
        known = summary_of(start.checkpoint.run_folder).get(FACTS)
        return None, {FACTS: known} if known else {}
    weights, initial, digests, refusal = None, None, {}, None
    try:
        if problems := init_problems(config):  # the weights may have changed since the first look, or be others here
            raise ConfigError(problems)
        weights = open_weights(weights_path(config.model.init_from))
        initial = InitialWeights(weights, config.model, pieces_of_new_tokens(config, weights, tokenizer))
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        digests = weights.digests(rank, world)
    except (ConfigError, OSError) as error:
        refusal = error if isinstance(error, ConfigError) else ConfigError(Problem(KEY, f"cannot be read: {error}."))
    digest = _agreed_digest(weights, digests, refusal)
    if weights is None or initial is None:
        raise RuntimeError("no rank refused, and there are no weights")
    facts = {
        "path": str(weights.path),
        "kind": weights.kind,
        "architecture": weights.architecture,
        "digest": digest,
        "new_tokens": len(initial.pieces),
    }
    _say(config, weights, facts)
    return initial, {FACTS: facts}


def _agreed_digest(weights: Weights | None, digests: dict[str, str], refusal: ConfigError | None) -> str:
    """Return the digest of the whole content, of each rank's share. Raises AgreedError where ranks differ or refuse."""
    problems = [] if refusal is None else list(refusal.problems)
    sizes = {} if weights is None else {file.name: file.stat().st_size for file in weights.files()}
    here = (problems, sizes, digests)
    found = [here]
    if dist.is_initialized():
        found *= dist.get_world_size()
        dist.all_gather_object(found, here)
    if refused := dict.fromkeys(problem for problems, _, _ in found for problem in problems):
        raise AgreedError(list(refused))
    if others := [str(rank) for rank, (_, sizes, _) in enumerate(found) if sizes != found[0][1]]:
        text = f"leads to other files on rank(s) {', '.join(others)} than on rank 0. Give every node the same folder."
        raise AgreedError(Problem(KEY, text))
    return digest_of({name: digest for _, _, its in found for name, digest in its.items()})


def _say(config: Config, weights: Weights, facts: dict[str, Any]) -> None:
    if not is_first_rank():
        return
    named = f", {facts['architecture']}" if facts["architecture"] else ""
    added = f", {facts['new_tokens']:,} new tokens" if facts["new_tokens"] else ""
    print(f"init   {weights.path} ({weights.kind}{named}, digest {facts['digest'][:8]}{added})", flush=True)
    if note := length_note(config, weights):
        print(note, flush=True)
    if weights.tokenizer is None:
        print("note   the weights bring no tokenizer.json: nothing says that data.tokenizer is theirs", flush=True)
