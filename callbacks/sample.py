"""A text sample of the trained model at the end of a run."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.panel import Panel
from rich.text import Text

from lightning_llm.base.terminal import escaped, excerpt, new_console, one_line
from lightning_llm.tracking.run_state import is_among_jobs

log = logging.getLogger(__name__)
SHOWN_LINES = 12
SWEEP_COLUMNS = 160
"""Maximum width of the line that a job shows on its sweep's terminal."""


class Sample(pl.Callback):
    """Generates `max_new_tokens` tokens after `prompt` when training has ended, shows them and writes `sample.txt`.

    Control characters are escaped in both. A terminal gets the first `SHOWN_LINES` lines, or one line if jobs of a
    sweep share it; the file gets all of them.

    An empty prompt means the start of a document. Random numbers come from a separate generator, seeded by `seed`. The
    model's training mode is restored. All ranks generate, rank 0 shows the text.
    """

    def __init__(
        self,
        prompt: str = "",
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = 50,
        seed: int = 0,
    ):
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_k = top_k
        self.seed = seed

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Generate the sample. A failure is reported, but does not make the run fail."""
        try:
            text = self._generate(trainer, pl_module)
            if trainer.is_global_zero:
                file = Path(pl_module.config.run.dir, "sample.txt")
                file.write_text(escaped(text), encoding="utf-8")
                if is_among_jobs():
                    print(f"sample {one_line(text, SWEEP_COLUMNS)}  ({file})", flush=True)
                    return
                shown, left_out = excerpt(text, SHOWN_LINES)
                more = f"{left_out} more lines in {file}" if left_out else None
                new_console().print(Panel(Text(shown), title="sample", title_align="left", subtitle=more))
        except Exception as error:
            log.warning("no sample was generated: %s: %s", type(error).__name__, error)

    def _generate(self, trainer: pl.Trainer, pl_module: Any) -> str:
        from lightning_llm.model.generate import generate

        tokenizer, model = pl_module.tokenizer, pl_module.whole_model
        tokens = [int(token) for token in tokenizer.encode_batch([self.prompt])[0]] or [tokenizer.end_of_document]
        device = trainer.strategy.root_device
        prompt_tokens = torch.tensor([tokens], dtype=torch.int64, device=device)  # [1, T]
        generated = generate(
            model,
            prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            generator=torch.Generator(device=device).manual_seed(self.seed),
        )  # [1, T + max_new_tokens]
        tokens = generated[0].tolist()
        return tokenizer.decode(tokens if self.prompt else tokens[1:])
