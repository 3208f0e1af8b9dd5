"""`Config` -> the objects that train. Every class named in YAML is made here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_llm.callbacks.run_folder import RecordSink, RunFolder
from lightning_llm.check import native_decision
from lightning_llm.data.corpus import Corpus
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.identity import config_hash
from lightning_llm.parallel.layout import Layout
from lightning_llm.ranks import rank_environment
from lightning_llm.schema import Config
from lightning_llm.train.checkpointing import Checkpointing
from lightning_llm.train.manifest import Checkpoint
from lightning_llm.train.module import LanguageModule
from lightning_llm.train.precision_plugin import TrainPrecision
from lightning_llm.train.strategy import TrainStrategy


def choose_device(config: Config) -> torch.device:
    """Return the device of this rank: the CUDA device of its local number, or the CPU.

    Raises:
        ConfigError: trainer.accelerator=cuda where torch finds no CUDA device, or fewer than ranks.
    """
    wanted, found = config.trainer.accelerator, torch.cuda.is_available()
    if wanted == "cuda" and not found:
        text = f"is 'cuda', and torch {torch.__version__} finds no CUDA device. Set auto or cpu."
        raise ConfigError(Problem("trainer.accelerator", text))
    if not found or wanted == "cpu":
        return torch.device("cpu")
    environment = rank_environment()
    if config.trainer.devices > torch.cuda.device_count():
        text = (
            f"is {config.trainer.devices}, and this machine has {torch.cuda.device_count()} CUDA device(s). Lower it."
        )
        raise ConfigError(Problem("trainer.devices", text))
    device = torch.device("cuda", environment.local_rank if environment else 0)
    torch.cuda.set_device(device)
    return device


def build_module(config: Config, corpus: Corpus) -> LanguageModule:
    """Return the LightningModule; its weights are made when training starts."""
    return LanguageModule(config, corpus.tokenizer, list(config.data.sources), native_decision(config))


def build_trainer(
    config: Config,
    device: torch.device,
    layout: Layout,
    checkpoint: Checkpoint | None,
    sinks: list[RecordSink],
    facts: Mapping[str, Any] | None = None,
) -> pl.Trainer:
    """Return the Trainer, its callbacks in the order: those of the config, the run folder's writer, checkpointing.

    `facts` is what the run's summary says of it beside the config.
    """
    if config.trainer.deterministic:
        # It would fill every tensor that torch.empty makes, so that whoever reads one before writing it reads NaN: a
        # search for faults in kernels, and 3.5 % of a quickstart step's operator time on a CPU.
        settings: Any = torch.utils.deterministic  # a module whose attributes a type checker does not see
        settings.fill_uninitialized_memory = False
    folder = RunFolder(Path(config.run.dir), sinks, _resumed_from(config, checkpoint), facts)
    environment = TorchElasticEnvironment() if rank_environment() else LightningEnvironment()
    devices = config.trainer.devices
    return pl.Trainer(
        accelerator="cuda" if device.type == "cuda" else "cpu",
        devices=devices,
        num_nodes=(config.world or devices) // devices,
        strategy=TrainStrategy(layout, device, environment, checkpoint),
        max_steps=config.trainer.max_steps,
        max_epochs=-1,
        val_check_interval=config.trainer.validate_every_steps or config.trainer.max_steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        plugins=[TrainPrecision(config.precision)],
        deterministic=config.trainer.deterministic,
        use_distributed_sampler=False,
        callbacks=_callbacks(config, folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,  # a block compiled under inference_mode is compiled again to train
        default_root_dir=config.run.dir,
    )


def _callbacks(config: Config, folder: RunFolder) -> list[pl.Callback]:
    chosen = [instantiate(node) for node in config.callbacks.values() if node is not None]
    return [
        *chosen,
        folder,
        Checkpointing(
            folder.run_dir / "checkpoints",
            config.checkpoint,
            config_hash(config),
            config.trainer.max_steps,
            config.trainer.validate_every_steps,
        ),
    ]


def _resumed_from(config: Config, checkpoint: Checkpoint | None) -> int | None:
    """Return the step that the run's records are cut back to: 0 for one begun afresh in its folder, None if new."""
    if checkpoint is not None:
        return checkpoint.step
    return None if config.resume is None else 0
