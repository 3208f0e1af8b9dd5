"""The torch class of the token mixer `average`."""

import torch
import torch.nn.functional as F

from lightning_llm.model.linear import Linear


class AverageModule(torch.nn.Module):
    def __init__(self, spec, model):
        super().__init__()
        self.decay = spec.decay
        self.v_proj = Linear(model.hidden_size, model.hidden_size, bias=False)
        self.g_proj = Linear(model.hidden_size, model.hidden_size, bias=False)
        self.o_proj = Linear(model.hidden_size, model.hidden_size, bias=False)

    def forward(self, x, rope, document_ids):  # x [B, T, D]; document_ids [B, T], or None for whole sequences
        steps = torch.arange(x.shape[1], device=x.device)
        distance = steps[:, None] - steps  # [T, T]
        weights = (1 - self.decay) * self.decay ** distance.clamp(min=0) * (distance >= 0)  # [T, T]
        if document_ids is not None:
            weights = weights * (document_ids[:, :, None] == document_ids[:, None, :])  # [B, T, T]
        averaged = weights.to(x.dtype) @ self.v_proj(x)  # [B, T, D], or this rank's features
        return self.o_proj(averaged * F.silu(self.g_proj(x)))  # [B, T, D]
