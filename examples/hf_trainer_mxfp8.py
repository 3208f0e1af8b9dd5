"""Does MXFP8 hurt my Hugging Face Trainer run? Trains each arm with several seeds and compares trainer_state.json.

python examples/hf_trainer_mxfp8.py --recipe mxfp8 --steps 200 --seeds 3 --output outputs/hf
lightning-llm compare --from outputs/hf/*/*/trainer_state.json --pattern "{arm}/{seed}/*.json" --baseline baseline
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from lightning_llm import quantize
from lightning_llm.__main__ import main

SEQUENCE_LENGTH = 128


def train(recipe: str | None, seed: int, steps: int, text: bytes, folder: Path) -> None:
    """Train one run; `trainer_state.json` in `folder` has its losses."""
    set_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=SEQUENCE_LENGTH,
        )
    )  # fmt: skip
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, SEQUENCE_LENGTH, SEQUENCE_LENGTH)
    rows = [{"input_ids": piece, "labels": piece} for piece in pieces]
    held_out = max(1, len(rows) // 10)
    arguments = TrainingArguments(
        output_dir=str(folder), seed=seed, max_steps=steps, learning_rate=2e-3, per_device_train_batch_size=8,
        logging_steps=1, eval_strategy="steps", eval_steps=max(1, steps // 20), save_strategy="no", report_to=[],
        bf16=torch.cuda.is_available(), logging_nan_inf_filter=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows[held_out:], eval_dataset=rows[:held_out])
    if recipe:
        optimizer = trainer.create_optimizer()
        print(quantize(model, recipe, keep=["lm_head"], optimizer=optimizer, seed=seed, max_steps=steps))
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("outputs/hf"))
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="text to train on, as bytes")
    asked = parser.parse_args()
    logs = []
    for arm, recipe in (("baseline", None), (asked.recipe, asked.recipe)):
        for seed in range(asked.seeds):
            folder = asked.output / arm / str(seed)
            train(recipe, seed, asked.steps, asked.text.read_bytes(), folder)
            logs.append(f"{arm}/{seed}={folder / 'trainer_state.json'}")
    raise SystemExit(main(["compare", "--from", *logs, "--baseline", "baseline"]))
