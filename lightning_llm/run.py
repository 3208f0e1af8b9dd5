"""One run, from a checked config to an exit code."""

import logging
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

from lightning_llm.build import build_module, build_trainer, choose_device
from lightning_llm.callbacks.mlflow import MLflowTracker, tracking_uri
from lightning_llm.callbacks.run_folder import RecordSink
from lightning_llm.config_file import write_config
from lightning_llm.data.corpus import Corpus, open_corpus
from lightning_llm.model.flops import count_parameters
from lightning_llm.plan import plan_line
from lightning_llm.run_state import Start
from lightning_llm.schema import Config
from lightning_llm.train.checkpointing import StoppedBySignal
from lightning_llm.train.datamodule import CorpusDataModule
from lightning_llm.train.manifest import drop_after
from lightning_llm.train.nonfinite import NonFiniteError


def run(config: Config, start: Start) -> int:
    """Train; return 0, 1 where the loss stopped being finite, or 128 + the signal that stopped it.

    Any other failure is raised: its traceback is the message, and the run's folder says "failed".
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop_before_training)
    quiet_lightning()
    device = choose_device(config)
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    print(plan_line(config, device), flush=True)
    try:
        corpus = open_corpus(config.data, config.seed, config.model.vocab_size, progress=True)
        print(data_line(config, corpus), flush=True)
        prepare_folder(config, corpus, start)
        module = build_module(config, corpus)
        trainer = build_trainer(config, device, start.checkpoint, tracking_sinks(config, corpus))
        trainer.fit(module, CorpusDataModule(corpus, config))
    except StoppedBySignal as stop:
        print(f"{stop}; go on with resume=auto run.dir={config.run.dir}", file=sys.stderr)
        return 128 + stop.number
    except NonFiniteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"run    {config.run.dir}")
    if config.logger.name == "mlflow":
        print(f"curves make ui, or: mlflow ui --backend-store-uri {tracking_uri(config)}")
    return 0


def data_line(config: Config, corpus: Corpus) -> str:
    """Return what the run takes from each source, in tokens and epochs, and how much is held out."""
    parts = [
        f"{each.name} {each.achieved_share:.1%} = {each.drawn_tokens:,} tokens"
        f" ({each.epochs:.2f} epochs of {each.available_tokens:,}; {each.validation_tokens:,} held out)"
        for each in corpus.report(config.trainer.max_steps * config.data.global_batch_size)
    ]
    return "data   " + " | ".join(parts)


def prepare_folder(config: Config, corpus: Corpus, start: Start) -> None:
    """Make the run's folder with config.yaml and tokenizer.json; checkpoints after the start are dropped."""
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_config(config, folder / "config.yaml")
    corpus.tokenizer.save(folder / "tokenizer.json")
    drop_after(folder / "checkpoints", start.step)


def quiet_lightning() -> None:
    """Keep Lightning's hints about settings that are chosen here on purpose out of the user's terminal."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch")


def tracking_sinks(config: Config, corpus: Corpus) -> list[RecordSink]:
    """Return where the run's records go beside its own folder."""
    if config.logger.name == "none":
        return []
    parameters = {"parameters": count_parameters(config.model).total}
    return [MLflowTracker(config, Path(config.run.dir), parameters, {"data_hash": corpus.fingerprint})]


def _stop_before_training(number: int, frame: FrameType | None) -> None:
    raise StoppedBySignal(number, None)
