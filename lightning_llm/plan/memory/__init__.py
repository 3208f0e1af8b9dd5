"""Bytes that a rank holds, by formula, and the trainers for which they can be estimated. Imports no torch.

Other trainers are described to compare the estimates with their published figures.
"""

from typing import NamedTuple


class Accounting(NamedTuple):
    """Properties of the trainer `name` that affect memory; the defaults are this trainer's.

    - `every_product`: selective checkpointing keeps the output of every n-th matrix product of a block, from the first.
    - `fp32_logits`: the loss is computed from all logits at once in fp32.
    - `one_root`: FSDP2's root is embedding, norm and head together, in the compute dtype.
    - `gathers_context`: a rank keeps the keys and values of all context-parallel ranks; false for a ring.
    - `keeps_outputs`: a pipeline's last stage keeps the logits of all micro-batches until the step ends.
    - `buffers`: 16-bit weights and fp32 gradients are in contiguous buffers, and masters in the optimizer.
    - `receives_all`: a pipeline stage has receive buffers for all micro-batches of a step.
    - `gives_away`: a pipeline stage frees an output once it is sent; its only buffers are inputs in flight.
    """

    name: str
    every_product: int = 1
    fp32_logits: bool = False
    one_root: bool = False
    gathers_context: bool = True
    keeps_outputs: bool = False
    buffers: bool = False
    receives_all: bool = False
    gives_away: bool = False


OURS = Accounting("lightning_llm")
ACCOUNTINGS = {
    "lightning_llm": OURS,
    # torchtitan at 9dec370 (2024-12-26): parallelisms/parallelize_llama.py (_custom_policy; apply_fsdp), train.py
    # (loss_fn; max_reserved), torch's pipelining of then (output_chunks, args_recv_info), context parallelism (a ring).
    "torchtitan": Accounting(
        "torchtitan",
        every_product=2,
        fp32_logits=True,
        one_root=True,
        gathers_context=False,
        keeps_outputs=True,
        receives_all=True,
    ),
    # Megatron-LM at d98e8a6: bf16 weights, fp32 gradients: 18 bytes per parameter, 6 + 12/d with the distributed
    # optimizer (docs of megatron.core.optimizer.distrib_optimizer); core/pipeline_parallel/schedules.py.
    "megatron": Accounting("megatron", buffers=True, gives_away=True),
}
"""Values of `plan --accounting`. All except lightning_llm describe other trainers."""
