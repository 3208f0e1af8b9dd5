"""A callback that fails with secrets in its message, as a server's client may."""

import os
from typing import Any

import lightning.pytorch as pl


class Leaks(pl.Callback):
    """Raises after the second step."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step < 2:
            return
        text = f"PUT https://someone:{os.environ['CANARY_OF_ADDRESS']}@127.0.0.1:9/x refused"
        raise RuntimeError(f"{text}; sent Authorization: Bearer {os.environ['HF_TOKEN']}")
