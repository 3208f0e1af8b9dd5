"""Muon orthogonalizes each expert's matrix: not the stack, and not by AdamW."""

import torch
from torch import nn

from lightning_llm.config.schema.optim import ParameterShard
from lightning_llm.linalg.grouped import GroupedLinear, mark_stacks
from lightning_llm.optim.kinds import MuonConfig
from lightning_llm.optim.muon import Muon, orthogonalised

MUON = MuonConfig(name="muon", learning_rate=0.1, weight_decay=0.05)


def test_each_expert_gets_the_update_of_its_own_matrix():
    """As four matrices under `torch.optim.Muon`, bit for bit, over three steps."""
    torch.manual_seed(0)
    layer = GroupedLinear(4, 16, 24)
    nn.init.normal_(layer.weight)
    alone = [nn.Parameter(part.detach().clone()) for part in layer.weight.chunk(4)]
    mark_stacks(layer)
    ours = Muon([("layers.0.feed_forward.experts.up_proj.weight", layer.weight)], MUON)
    assert [group["matrices"] for group in ours.param_groups] == [True]  # AdamW would take "vector"s
    theirs = torch.optim.Muon(
        alone, lr=0.1, weight_decay=0.05, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        gradients = [torch.randn(24, 16) for _ in range(4)]
        layer.weight.grad = torch.cat(gradients)
        for parameter, gradient in zip(alone, gradients, strict=True):
            parameter.grad = gradient
        ours.step()
        theirs.step()
        assert torch.equal(layer.weight, torch.cat([parameter.detach() for parameter in alone]))


def test_the_stack_as_one_matrix_would_get_another_update():
    stack = torch.randn(96, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = orthogonalised(stack.clone(), 5)
    parts = torch.cat([orthogonalised(part.clone(), 5) for part in stack.chunk(4)])
    assert (whole - parts).abs().max() > 0.1
    singular = torch.linalg.svdvals(parts.float().view(4, 24, 16))
    assert singular.min() > 0.5
    assert singular.max() < 1.4


def test_experts_are_hidden_matrices_in_the_plan():
    shard = ParameterShard(4 * 24, 16, "hidden")
    assert MUON.state_bytes(shard, 4) == 4 * 4 * 24 * 16  # momentum alone; AdamW would take twice as much
