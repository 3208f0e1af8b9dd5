"""Several models judged as one: whether they can be, and the mean of their weights; predictions: `model.ensemble`."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim.swa_utils import get_swa_avg_fn

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.weight_folders import NOT_OF_WEIGHTS
from lightning_llm.evaluate.weights import tokenizer_of
from lightning_llm.parallel.apply import InitialSlice
from lightning_llm.probe.subject import Subject


class AverageWeights:
    """The fp32 mean of several models' weights by slices, as `torch.optim.swa_utils.AveragedModel` takes it.

    A running mean, so that of equal weights it is these, bit for bit.
    """

    def __init__(self, members: Sequence[InitialSlice]):
        self.members = members
        self._take_in = get_swa_avg_fn()

    def __call__(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` of parameter `name`, see `InitialSlice`."""
        first, *others = self.members
        mean = first(name, start, stop)
        for count, member in enumerate(others, start=1):
            mean = self._take_in(mean, member(name, start, stop), count)
        return mean


def check_members(subjects: Sequence[Subject], *, same_shape: bool) -> None:
    """Raise ConfigError unless all of `subjects` have one tokenizer, and with `same_shape` one model."""
    first, *others = subjects
    problems: list[Problem] = []
    shape = first.config.model.model_dump(exclude=set(NOT_OF_WEIGHTS))
    for subject in others:
        if tokenizer_of(subject).fingerprint != tokenizer_of(first).fingerprint:
            text = f"has another tokenizer than {first.folder}: its tokens mean something else."
            problems.append(Problem(str(subject.folder), text))
        own = subject.config.model.model_dump(exclude=set(NOT_OF_WEIGHTS))
        if same_shape and (differing := [key for key in shape if own[key] != shape[key]]):
            keys = ", ".join(f"model.{key} ({own[key]} and {shape[key]})" for key in differing)
            text = f"is no model of the shape of {first.folder}: {keys}. Weights of one shape alone have a mean."
            problems.append(Problem(str(subject.folder), text))
        if not same_shape and subject.config.model.vocab_size != first.config.model.vocab_size:
            sizes = f"{subject.config.model.vocab_size} and {first.config.model.vocab_size}"
            problems.append(Problem(str(subject.folder), f"predicts another vocabulary than {first.folder}: {sizes}."))
    if problems:
        raise ConfigError(problems)
