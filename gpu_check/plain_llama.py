"""Hand-written Llama in plain torch, independent of this package, and a training loop: the baseline for `train`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_llm.config.schema.model import ModelConfig


class PlainLlama(nn.Module):
    """Grouped attention, SwiGLU, RMSNorm, with the sizes of `config` but without its rope scaling."""

    def __init__(self, config: ModelConfig, length: int, device: str):
        super().__init__()
        size, width = config.hidden_size // config.num_heads, config.hidden_size
        with torch.device(device):
            self.embedding = nn.Embedding(config.vocab_size, width)
            self.blocks = nn.ModuleList([PlainBlock(config, size) for _ in range(config.num_layers)])
            self.norm = nn.RMSNorm(width, eps=config.norm_eps)
            self.head = nn.Linear(width, config.vocab_size, bias=False)
            rates = config.rope_theta ** -(torch.arange(0, size, 2) / size)
            angles = torch.outer(torch.arange(length), rates).repeat(1, 2)  # [T, K]
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, T, V]` of `tokens` `[B, T]`."""
        return self.head(self.norm(self.hidden(tokens)))

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the output of the last block for `tokens` `[B, T]`: `[B, T, D]`."""
        x = self.embedding(tokens)  # [B, T, D]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


class PlainBlock(nn.Module):
    """Attention and feed-forward network, pre-norm."""

    def __init__(self, config: ModelConfig, size: int):
        super().__init__()
        width, ffn = config.hidden_size, config.ffn_hidden_size
        self.size = size
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(width, eps=config.norm_eps) for _ in range(2))
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, config.num_kv_heads * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return `[B, T, D]` of `x` `[B, T, D]`."""
        normed = self.attention_norm(x)
        q, k, v = (f(normed).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (turned(each, cos, sin).to(v.dtype) for each in (q, k))  # [B, H, T, K], [B, G, T, K]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # [B, H, T, K]
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` `[B, H, T, K]` with rotary position embeddings applied."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def plain_step(config: ModelConfig, sequences: int, length: int, device: str, compiled: bool) -> Callable[[], None]:
    """Return a function that makes one step of a typical training loop: autocast to bf16 over fp32 weights,
    cross-entropy of fp32 logits, clipping, fused AdamW. With `compiled`, each block is compiled, and the head with the
    loss, as in torchtitan: one graph of all blocks would take minutes to compile."""
    model = PlainLlama(config, length, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(config.vocab_size, (sequences, length + 1), device=device)

    def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.head(model.norm(hidden)).flatten(0, 1).float(), labels.flatten())

    loss = torch.compile(loss_of) if compiled else loss_of
    if compiled:
        for block in model.blocks:
            block.compile()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            made = loss(model.hidden(tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous())
        made.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step
