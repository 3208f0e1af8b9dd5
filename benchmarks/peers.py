"""Tokens per second at one shape: our model, transformers' and litgpt's in a plain loop, and transformers' Trainer."""

import tempfile
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

import torch
from torch import nn

from benchmarks.rotation import Row, interleaved_minima, stepping
from benchmarks.shape import BATCH, FFN, HEADS, HIDDEN, LAYERS, LENGTH, VOCAB, config, plain_step, random_batch
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.parallel.compile import compile_blocks


def our_step(compiled: bool, dtype: torch.dtype) -> Any:
    """Return a function that takes one step of our model in the same plain loop."""
    model = Decoder(config().model, dtype)
    initialise(model, 0)
    if compiled:
        compile_blocks(model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens, labels = random_batch()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = next_token_loss_sum(model(tokens), labels) / labels.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def hugging_face_model() -> nn.Module:
    """Return transformers' Llama at the shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=LENGTH, use_cache=False,
        )
    )  # fmt: skip


def litgpt_model() -> nn.Module | str:
    """Return litgpt's Llama at the shape, or why there is none."""
    try:
        from litgpt.model import GPT, Config
    except ModuleNotFoundError as error:
        if error.name == "litgpt":
            return "not measured: litgpt is not installed (pip install --no-deps litgpt)"
        return f"not measured: litgpt needs {error.name} (pip install {error.name})"
    return GPT(
        Config(
            n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_query_groups=HEADS, intermediate_size=FFN, vocab_size=VOCAB,
            padded_vocab_size=VOCAB, block_size=LENGTH, rotary_percentage=1.0, parallel_residual=False, bias=False,
            norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
        )
    )  # fmt: skip


def hugging_face_trainer_steps() -> Iterator[None]:
    """Yield after each step of transformers' Trainer in bf16."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    tokens, _ = random_batch()
    data = [{"input_ids": row, "labels": row} for row in tokens] * 4000
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=BATCH, bf16=True, use_cpu=True, report_to=[], max_steps=4000,
        logging_steps=10, save_strategy="no", optim="adamw_torch_fused", disable_tqdm=True,
    )  # fmt: skip
    go: Queue[bool] = Queue()
    done: Queue[None] = Queue()

    class Turnstile(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            go.get()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            done.put(None)
            go.get()

        def on_log(self, *_: Any, **__: Any) -> None:
            """Keep quiet."""

    trainer = Trainer(hugging_face_model(), arguments, train_dataset=data, callbacks=[Turnstile()])
    threading.Thread(target=trainer.train, daemon=True).start()
    while True:
        go.put(True)
        done.get()
        yield


def measure() -> Iterator[Row]:
    """Yield tokens per second of each, and our ratios to the fastest of the others."""
    from transformers.utils import is_accelerate_available

    transformers_llama = hugging_face_model()
    theirs = {"transformers, plain loop": stepping(lambda: plain_step(transformers_llama, True))}
    if is_accelerate_available():
        theirs["transformers, its Trainer"] = hugging_face_trainer_steps()
    else:
        why = "not measured: accelerate is not installed (pip install -e '.[bench]')"
        yield "transformers, its Trainer, bf16, tokens/s", None, why
    litgpt = litgpt_model()
    if isinstance(litgpt, nn.Module):
        theirs["litgpt, plain loop"] = stepping(lambda: plain_step(litgpt, True))
    else:
        yield "litgpt, plain loop, bf16, tokens/s", None, litgpt
    ours = {
        "ours, plain loop": stepping(our_step(False, torch.bfloat16)),
        "ours, plain loop, compiled": stepping(our_step(True, torch.bfloat16)),
    }
    best = interleaved_minima({**theirs, **ours}, rounds=10, steps=3)
    for name, seconds in best.items():
        yield f"{name}, bf16, tokens/s", BATCH * LENGTH / seconds, ""
    fastest = min(best[name] for name in theirs)
    yield "ours over the fastest of them, bf16", fastest / best["ours, plain loop"], ">= 1.05"
    yield "ours compiled over the fastest of them, bf16", fastest / best["ours, plain loop, compiled"], ">= 1.12"
