"""Is MXFP8 lossless for my model? Any nn.Module in a plain loop: two arms, several seeds, one verdict.

python examples/plain_loop.py --recipe mxfp8 --steps 300 --seeds 3
"""

import argparse
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from lightning_llm import compare, quantize

CONTEXT, WIDTH = 16, 64


def train(recipe: str, seed: int, steps: int, data: torch.Tensor) -> dict[str, list[float]]:
    """Return the losses of one run. The seed sets the weights and the order of the data, equal in both arms."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
    inputs = nn.Sequential(nn.Embedding(256, 8), nn.Flatten(), nn.Linear(8 * CONTEXT, WIDTH))
    model = nn.Sequential(OrderedDict(inputs=inputs, blocks=nn.Sequential(*blocks), head=nn.Linear(WIDTH, 256)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if recipe != "fp32":
        quantize(model, recipe, keep=["inputs", "head"], optimizer=optimizer, seed=seed)
    losses = []
    for _ in range(steps):
        tokens = data[torch.randint(len(data) - CONTEXT, (256, 1)) + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]), tokens[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"step": list(range(1, steps + 1)), "loss": losses}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="text to train on, as bytes")
    asked = parser.parse_args()
    data = torch.frombuffer(bytearray(asked.text.read_bytes()), dtype=torch.uint8).long()
    arms = ("fp32", asked.recipe)
    compare(
        curves={arm: {s: train(arm, s, asked.steps, data) for s in range(asked.seeds)} for arm in arms}, baseline="fp32"
    )
