"""A module that follows the training module's protocol, small enough for a run of some steps to take milliseconds."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_llm.config.schema import Config, ModelConfig

SOURCES = ("code", "prose")
VOCAB_SIZE = 11


def make_config(root: Path, max_steps: int = 6, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "model": {
            "name": "tiny",
            "vocab_size": VOCAB_SIZE,
            "num_layers": 1,
            "hidden_size": 8,
            "num_heads": 1,
            "num_kv_heads": 1,
            "ffn_hidden_size": 16,
            "max_sequence_length": 4,
        },
        "data": {
            "name": "made_up",
            "sources": {name: {"loader": "text", "path": "nowhere"} for name in SOURCES},
            "tokenizer": {"kind": "bytes"},
            "sequence_length": 4,
            "micro_batch_size": 2,
            "global_batch_size": 2,
        },
        "optim": {"name": "adamw", "learning_rate": 0.003},
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "precision": {"name": "fp32", "compute_dtype": "fp32"},
        "parallel": {"name": "single"},
        "trainer": {"name": "default", "max_steps": max_steps, "validate_every_steps": 3},
        "checkpoint": {"every_steps": None, "keep_last": 1},
        "callbacks": {},
        "logger": {"name": "mlflow"},
        "run": {"root": str(root), "experiment": "trial", "name": "first", "dir": str(root / "trial" / "first")},
        "recipe": "quickstart",
        "seed": 7,
    }
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    return Config(**values)


class Letters:
    """A tokenizer of the letters a-j; id 10 ends a document."""

    end_of_document = 10

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[ord(letter) - ord("a") for letter in text] for text in texts]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


class TinyModel(nn.Sequential):
    def __init__(self, config: ModelConfig):
        super().__init__(nn.Embedding(VOCAB_SIZE, 8), nn.Dropout(0.1), nn.Linear(8, VOCAB_SIZE))
        self.config = config


class TinyModule(pl.LightningModule):
    def __init__(self, config: Config, losses: dict[int, float] | None = None, fail_at: tuple[int, Any] | None = None):
        super().__init__()
        torch.manual_seed(config.seed)
        self.model = TinyModel(config.model)
        self.config = config
        self.tokenizer = Letters()
        self.flops_per_token = 6.0e9
        self.step_tokens = config.data.global_batch_size * config.data.sequence_length
        self.step_record: dict[str, Any] = {}
        self.validation_record: dict[str, Any] = {}
        self.true_losses: list[float] = []
        self.replaced_losses = losses or {}
        self.fail_at = fail_at
        self.completed_steps = 0

    @property
    def whole_model(self) -> nn.Module:
        return self.model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[0].flatten())
        step = self.completed_steps = self.completed_steps + 1
        if self.fail_at and self.fail_at[0] == step:
            raise self.fail_at[1]
        self.true_losses.append(loss.item())
        shown = self.replaced_losses.get(step, loss.item())
        self.step_record = {
            "step": step,
            "tokens": step * self.step_tokens,
            "loss": shown,
            "grad_norm": 0.5,
            "lr": 1e-3,
        }
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        step = self.completed_steps
        self.validation_record = {"step": step, "tokens": step * self.step_tokens, "val_loss": 3.0 - step / 100}
        self.validation_record |= {f"val_loss/{name}": 2.0 for name in SOURCES}


def fit(module: TinyModule, callbacks: list[pl.Callback]) -> pl.Trainer:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(10, (2 * module.config.trainer.max_steps, 4), generator=generator)  # [sequences, T]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=module.config.trainer.max_steps,
        val_check_interval=module.config.trainer.validate_every_steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module, DataLoader(TensorDataset(tokens), batch_size=2), DataLoader(TensorDataset(tokens[:2]), batch_size=2)
    )
    return trainer
