"""Router health: the load of the experts of each block, and a warning about experts that get no tokens."""

import logging
from typing import Any

import lightning.pytorch as pl

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.tracking.files import DEAD_EXPERTS
from lightning_llm.train.routing import FIGURES

log = logging.getLogger(__name__)
DEAD = FIGURES.index("dead")


class RouterHealth(pl.Callback):
    """Records the routers' figures of each block; every step has their means over blocks already (`moe/load_max`, ..).

    - every `every_steps`: `moe/FIGURE/BLOCK`, such as `moe/load_max/layers.3`, and so in MLflow and Prometheus
    - `event` "dead_experts", with a warning that names the blocks, once some expert of them has had no token for
      `dead_steps` steps in a row; another one only after all had tokens again

    Raises:
        ConfigError: an argument is below 1.
    """

    def __init__(self, every_steps: int = 10, dead_steps: int = 100):
        arguments = {"every_steps": every_steps, "dead_steps": dead_steps}
        if wrong := {name: value for name, value in arguments.items() if value < 1}:
            raise ConfigError([Problem(name, "must be at least 1.", value) for name, value in wrong.items()])
        self.every_steps, self.dead_steps = every_steps, dead_steps
        self._steps_with_dead = 0
        self._by_block: dict[str, list[float]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Note if there is nothing to observe."""
        if trainer.is_global_zero and not pl_module.train_step.routing.blocks_in_all:
            print("router no block of the model has experts (feed_forward.kind=moe): nothing to observe", flush=True)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Add the figures of blocks to the step's record, and count the steps with dead experts. Collective."""
        record, routing = pl_module.step_record, pl_module.train_step.routing
        if not routing.blocks_in_all:
            return
        self._steps_with_dead = self._steps_with_dead + 1 if record.get("moe/dead", 0) > 0 else 0
        alarm, step = self._steps_with_dead == self.dead_steps, record["step"]
        if not (alarm or step % self.every_steps == 0):
            return
        own = {block: figures.tolist() for block, figures in routing.by_block.items()}
        parts = trainer.strategy.layout.gather_over_stages(own)
        self._by_block = {block: figures for part in parts for block, figures in part.items()}
        for block, figures in self._by_block.items():
            record |= {f"moe/{name}/{block}": value for name, value in zip(FIGURES, figures, strict=True)}
        if alarm:
            self._warn(record, trainer.is_global_zero)

    def _warn(self, record: dict[str, Any], is_first: bool) -> None:
        """Name the blocks on the terminal and in the record; an event of the loss takes precedence."""
        dead = {block: int(figures[DEAD]) for block, figures in self._by_block.items() if figures[DEAD] > 0}
        record["event_blocks"], record["event/dead_experts"] = dead, 1
        if "event" not in record:
            record |= {"event": DEAD_EXPERTS, "event_action": "log"}
        if is_first:
            named = ", ".join(f"{count} of {block}" for block, count in dead.items())
            log.warning(
                "step %d: experts without a token for %d steps: %s. Raise balance_loss, or set "
                "router.bias_update_rate (docs/howto/train_experts.md)",
                *(record["step"], self.dead_steps, named),
            )
