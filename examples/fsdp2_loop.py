"""Can my torchtitan-style FSDP2 loop train under a recipe? Shards blocks with fully_shard and logs torchtitan's lines.

torchrun --nproc-per-node 2 examples/fsdp2_loop.py --recipe mxfp8 --seed 0 --output mxfp8-0.log
torchrun --nproc-per-node 2 examples/fsdp2_loop.py --recipe none --seed 0 --output bf16-0.log
lightning-llm compare --from *.log --pattern '{arm}-{seed}.log' --baseline bf16
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from lightning_llm import quantize

CONTEXT, BATCH_PER_RANK, WIDTH, HEADS = 64, 8, 64, 4


class Block(nn.Module):
    """A pre-norm Transformer block with torchtitan's names."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wqkv, self.wo = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1, self.w2 = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the block, [batch, tokens, width]."""
        q, k, v = self.wqkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.wo(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.w2(nn.functional.silu(self.w1(self.ffn_norm(x))))


class Decoder(nn.Module):
    """A byte-level decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, [batch, tokens, 256]."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def run(recipe: str, seed: int, steps: int, data: torch.Tensor, log: Path) -> None:
    """Train on all ranks; rank 0 writes the log."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(seed)
    model = Decoder().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if recipe != "none":
        report = quantize(model, recipe, keep=["output"], optimizer=optimizer, seed=seed, max_steps=steps)
        if dist.get_rank() == 0:
            print(report)
    order = torch.Generator().manual_seed(seed)
    batch = BATCH_PER_RANK * dist.get_world_size()
    lines = [
        f"[titan] Trainer is initialized with local batch size {BATCH_PER_RANK}, global batch size {batch}, gradient "
        f"accumulation steps 1, sequence length {CONTEXT}, total steps {steps} (warmup 0)"
    ]
    for step in range(1, steps + 1):
        starts = torch.randint(len(data) - CONTEXT - 1, (batch, 1), generator=order)
        mine = starts[dist.get_rank() :: dist.get_world_size()] + torch.arange(CONTEXT + 1)
        tokens = data[mine].to(device)
        loss = cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        mean /= dist.get_world_size()
        lines.append(f"[titan] step: {step:2}  loss: {mean.item():8.5f}  grad_norm: {norm.item():7.4f}  memory: 0GiB")
    if dist.get_rank() == 0:
        log.write_text("\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="mxfp8", help="precision recipe, or none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("fsdp2.log"))
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="text to train on, as bytes")
    asked = parser.parse_args()
    data = torch.frombuffer(bytearray(asked.text.read_bytes()), dtype=torch.uint8).long()
    run(asked.recipe, asked.seed, asked.steps, data, asked.output)
