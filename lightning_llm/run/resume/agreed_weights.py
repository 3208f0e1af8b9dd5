"""Weights that a run reads beside its own checkpoints: the same on all ranks, known by a digest of their content."""

from collections.abc import Callable, Iterable

import torch.distributed as dist

from lightning_llm.base.errors import AgreedError, ConfigError, Problem
from lightning_llm.config.weight_folders import weights_path
from lightning_llm.model.weights.folder import Weights, digest_of
from lightning_llm.run.resume.weights import open_weights


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
    here = (problems, sizes, digests)
    found = [here]
    if dist.is_initialized():
        found *= dist.get_world_size()
        dist.all_gather_object(found, here)
    if refused := dict.fromkeys(problem for problems, _, _ in found for problem in problems):
        raise AgreedError(list(refused))
    if others := [str(rank) for rank, (_, sizes, _) in enumerate(found) if sizes != found[0][1]]:
        text = f"leads to other files on rank(s) {', '.join(others)} than on rank 0. Give every node the same folder."
        raise AgreedError(Problem(key, text))
    if weights is None:
        raise RuntimeError("no rank refuses the weights, and this one has none")
    return weights, digest_of({name: digest for _, _, its in found for name, digest in its.items()})
