"""Small modules that `quantize` is tried on, and recipes with eager casts."""

import torch
from torch import nn

from lightning_llm.config.schema.precision import PrecisionConfig
from tests.precision.recipes import load

WIDTH, VOCABULARY = 64, 16


def eager(name: str) -> PrecisionConfig:
    return load(name).model_copy(update={"casts": "eager"})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Embedding, three blocks and a head; `reentrant`: how blocks are checkpointed, None for not at all."""

    def __init__(self, reentrant: bool | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.layers:
            if self.reentrant is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return self.lm_head(x)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).logsumexp(-1).mean() / 2


def batches(steps: int = 3) -> torch.Tensor:
    """Tokens [steps, 2 micro-batches, B, T]."""
    return torch.randint(VOCABULARY, (steps, 2, 2, 20), generator=torch.Generator().manual_seed(1))
