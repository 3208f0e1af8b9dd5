"""The peers' models at a shape: transformers' and litgpt's Llama, and the plain one that everyone writes by hand."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shape import Shape


class PlainLlama(nn.Module):
    """Llama in the fewest lines, as in nanoGPT: torch's attention, `nn.Linear`, rotary tables made once."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList([PlainBlock(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        size = shape.hidden // shape.heads
        angles = torch.outer(torch.arange(shape.length), 10_000 ** -(torch.arange(0, size, 2) / size))  # [T, K/2]
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)  # [T, K]
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)  # [T, K]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, T, V]` of `tokens` `[B, T]`."""
        x = self.embedding(tokens)  # [B, T, D]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class PlainBlock(nn.Module):
    """Attention and SwiGLU, pre-norm."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.norms = nn.ModuleList([nn.RMSNorm(shape.hidden, eps=1e-5) for _ in range(2)])
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate, self.up = (nn.Linear(shape.hidden, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return `[B, T, D]` of `x` `[B, T, D]`."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, K]
        q, k = (each * cos + torch.cat([-each.chunk(2, -1)[1], each.chunk(2, -1)[0]], -1) * sin for each in (q, k))
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)  # [B, H, T, K]
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def hugging_face(shape: Shape) -> nn.Module:
    """Return transformers' Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
            max_position_embeddings=shape.length, use_cache=False,
        )
    )  # fmt: skip


def litgpt(shape: Shape) -> nn.Module | str:
    """Return litgpt's Llama, or why there is none."""
    try:
        from litgpt.model import GPT, Config
    except ModuleNotFoundError as error:
        if error.name == "litgpt":
            return "not measured: litgpt is not installed (pip install --no-deps litgpt)"
        return f"not measured: litgpt needs {error.name} (pip install {error.name})"
    return GPT(
        Config(
            n_embd=shape.hidden, n_layer=shape.layers, n_head=shape.heads, n_query_groups=shape.heads,
            intermediate_size=shape.ffn, vocab_size=shape.vocab, padded_vocab_size=shape.vocab,
            block_size=shape.length, rotary_percentage=1.0, parallel_residual=False, bias=False,
            norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[Shape], nn.Module | str]] = {
    "transformers": hugging_face,
    "litgpt": litgpt,
    "a plain model": PlainLlama,
}
