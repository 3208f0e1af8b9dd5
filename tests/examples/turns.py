from typing import Literal

from lightning_llm.config.schema.data import MIXTURES, MixtureConfig
from lightning_llm.data.mixing.addressing import MixturePhase


@MIXTURES.register
class TurnsConfig(MixtureConfig):
    """Sources in turn, ignoring their weights."""

    kind: Literal["turns"] = "turns"

    def problems(self, key, weights):
        return []

    def build(self, weights, step_samples, max_steps):
        return Turns(list(weights))


class Turns:
    def __init__(self, names):
        self.names = names

    def ordinal(self, index):
        before, source = divmod(index, len(self.names))
        return source, before

    def drawn(self, total):
        return [len(range(source, total, len(self.names))) for source in range(len(self.names))]

    def phases(self, total):
        yield MixturePhase("turns", 0, total, tuple(self.drawn(total)))
