from functools import cache
from typing import Any, Literal

from lightning_llm.config.schema.optim import OPTIMIZERS, Beta, OptimConfig, ParameterShard


@OPTIMIZERS.register
class LionConfig(OptimConfig):
    """Lion: the sign of an interpolated momentum."""

    name: Literal["lion"] = "lion"
    beta1: Beta = 0.9
    beta2: Beta = 0.99

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        return dtype_bytes * shard.elements  # one momentum, in the parameter's dtype

    def build(self, parameters: Any, on_whole: Any) -> Any:
        return lion_class()(parameters, self)


@cache
def lion_class():
    import torch

    from lightning_llm.optim.optimizer import groups_of

    class Lion(torch.optim.Optimizer):
        def __init__(self, parameters, config):
            super().__init__(groups_of(parameters, config), {"lr": config.learning_rate})
            self.config = config

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    momentum, gradient = state["momentum"], parameter.grad
                    update = (momentum * self.config.beta1 + gradient * (1 - self.config.beta1)).sign()
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update * group["lr"])
                    momentum.mul_(self.config.beta2).add_(gradient * (1 - self.config.beta2))

    return Lion
