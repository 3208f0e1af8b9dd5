"""Muon on sharded matrices: the bits of torch.optim.Muon's update under every layout."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_llm.linalg import local
from lightning_llm.optim.kinds import MuonConfig
from lightning_llm.optim.matrices import MatrixOptimizer, OnWhole, gradient_of, matrix_shape, on_one_rank

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Jordan et al. 2024's quintic, chosen for its slope at zero: it ends near, not at, singular values of 1."""
EPS = 1e-7


class Muon(MatrixOptimizer):
    """Muon for matrices of blocks, and AdamW for all other parameters.

    Each rank has its part of momentum and weights. The update is orthogonalized as a whole matrix, by one of the ranks.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: MuonConfig, on_whole: OnWhole = on_one_rank
    ):
        super().__init__(parameters, config, ("hidden",))
        self.config, self.on_whole = config, on_whole

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}

    def update(self, group: dict[str, Any]) -> None:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        rate, steps = group["lr"], self.config.newton_schulz_steps
        for parameter, direction in self.on_whole(trained, self._direction, lambda x: orthogonalised(x, steps)):
            scale = rate * self.config.learning_rate_scale(*matrix_shape(parameter))

            def change(weight: Tensor, rows: slice, direction: Tensor = direction, scale: float = scale) -> Tensor:
                return weight.mul_(1 - rate * group["weight_decay"]).add_(direction[rows], alpha=-scale)

            if self.rounding is None:
                change(local(parameter), slice(None))
            else:
                self.write(parameter, change)

    def _direction(self, parameter: nn.Parameter) -> Tensor:
        """Add the gradient to the momentum; return this rank's part of the update, bf16, not yet orthogonal."""
        gradient, buffer = gradient_of(parameter), local(self.state[parameter]["momentum_buffer"])
        buffer.lerp_(gradient, 1 - self.config.momentum)
        update = gradient.lerp(buffer, self.config.momentum) if self.config.nesterov else buffer
        return update.to(torch.bfloat16, copy=True)


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """Return the orthogonalized bf16 `matrix` [A, B], by `steps` Newton-Schulz iterations; `matrix` is overwritten.

    Singular vectors stay, singular values become about 0.7 to 1.2. The operations are those of torch.optim.Muon.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x.div_(x.norm().clamp(min=EPS))  # the spectral norm is then at most 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
