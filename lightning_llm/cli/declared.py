"""The verbs of the command line, each declared once: its name, its help, its arguments, and the function behind it.

A verb's module is named and not imported: it is when the verb is called.
"""

from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_llm.cli import completion
from lightning_llm.cli.options import (
    add_composition,
    add_config_dir,
    add_device,
    add_evaluate_options,
    add_export_options,
    add_generate_options,
    add_import_options,
    add_ladder_options,
    add_multirun,
    add_probe_options,
    add_search_options,
    golden_actions,
)
from lightning_llm.plan.memory.accounting import ACCOUNTINGS, OURS

OVERRIDES = "overrides are Hydra's: recipe=quickstart precision=fp32 trainer.max_steps=200 run.name=mine\n"
EXIT_CODES = (
    "exit codes: 0 done, 1 the run failed, 2 the config or an input is wrong, "
    "75 stopped by trainer.max_time or SIGUSR1, to go on, 129/130/143 stopped by SIGHUP, SIGINT or SIGTERM, all with "
    "state saved"
)


@dataclass(frozen=True)
class Verb:
    """One verb: `function` is "module:name" of what takes the parsed arguments and returns the exit code.

    `add_arguments` declares what it takes, `--json` aside, which `prints_data` adds. `composes`: it reads a config from
    overrides, or from a file; `prints_result`: it fails where its standard output cannot be written, and others go on;
    `explains_overrides`: its help says what they look like.
    """

    function: str
    help: str
    add_arguments: Callable[[ArgumentParser], None]
    prints_data: bool = False
    composes: bool = False
    prints_result: bool = False
    explains_overrides: bool = False

    @property
    def epilog(self) -> str:
        """What stands below its help."""
        return OVERRIDES + EXIT_CODES if self.composes or self.explains_overrides else EXIT_CODES

    def declare(self, parser: ArgumentParser) -> None:
        """Add all its arguments to `parser`."""
        self.add_arguments(parser)
        if self.prints_data:
            parser.add_argument("--json", action="store_true", help="print data instead of text")


def _train(parser: ArgumentParser) -> None:
    add_composition(parser)
    add_config_dir(parser)
    add_multirun(parser)


def _plan(parser: ArgumentParser) -> None:
    add_composition(parser)
    add_config_dir(parser)
    text = "every precision recipe on every kind of GPU: native or emulated"
    parser.add_argument("--matrix", action="store_true", help=text)
    text = "take one step of every rank that differs, on tensors without data: bytes and collectives, counted"
    parser.add_argument("--dry-run", action="store_true", help=text)
    whose = "whose way of training memory is counted for, to hold another's published figures against"
    parser.add_argument("--accounting", choices=ACCOUNTINGS, default=OURS.name, help=whose)
    text = "write the run as a batch script for Slurm (sbatch FILE), with its config in FILE.yaml"
    parser.add_argument("--script", type=Path, metavar="FILE", help=text)
    add_search_options(parser)
    add_multirun(parser)


def _config(parser: ArgumentParser) -> None:
    add_composition(parser)
    what = parser.add_mutually_exclusive_group()
    group: Any = what.add_argument(
        "--group", nargs="?", const="", metavar="NAME", help="a group's values, one line each; without NAME all groups"
    )
    group.completer = completion.complete_group
    what.add_argument("--diff", action="store_true", help="the overrides that make it of the defaults")
    add_multirun(parser)
    add_config_dir(parser)


def _prepare(parser: ArgumentParser) -> None:
    add_composition(parser)
    add_config_dir(parser)
    add = parser.add_argument
    what = "score documents instead: quality=SCORER, diversity=SCORER, MEASURE.KEY=VALUE (docs/data_recipes.md)"
    add("--score", nargs="+", metavar="MEASURE=SCORER", help=what)
    add("--output", type=Path, metavar="FILE", help="where to write scores (scores.parquet)")


def _health(parser: ArgumentParser) -> None:
    add_composition(parser)
    add_config_dir(parser)
    add = parser.add_argument
    least = "the least that figures may be: gemm.bf16.tflops: 60%%, all_reduce.bus_gb_per_second: 300, ..."
    add("--fail-below", type=Path, metavar="FILE", help=least)
    share = "a rank is named that is slower than the others by more than this share (0.1)"
    add("--slower-than", type=float, default=0.1, metavar="SHARE", help=share)
    add("--short", action="store_true", help="what trainer.health=true looks at: neither pairs of ranks nor the disk")
    add("--output", type=Path, metavar="DIR", help="for cluster/measured.yaml and links.yaml (run.root/health)")


def _compare(parser: ArgumentParser) -> None:
    add = parser.add_argument
    runs = "folders of runs or above runs, experiments, SWEEP or SWEEP/N, MLflow ids; none: the last sweep"
    add("runs", nargs="*", metavar="RUN", help=runs)
    add("--baseline", metavar="GROUP=LEVEL", help="what to hold the others against; also KEY=VALUE (precision=bf16)")
    add("--best-of", metavar="KEY", help="each recipe at its best value of a key (optim.learning_rate), by other seeds")
    add(
        "--choose-by",
        metavar="SEEDS",
        help="seeds that choose with --best-of, and are not judged (the lowest); all: all choose, and judge",
    )
    margin = "the gap that is still lossless, nats (as declared, or 0.01), or tokens more that may be needed (2%%)"
    add("--margin", metavar="NATS|N%", help=margin)
    add("--confidence", type=float, metavar="P", help="of all intervals together (as declared, or 0.95)")
    add("--metric", metavar="KEY", help="of validation lines (as declared, or val_loss; also val_loss/SOURCE)")
    add("--tail", type=float, metavar="SHARE", help="last share of the steps, averaged over (as declared, or 0.1)")
    add(
        "--all-pairs",
        action="store_true",
        help="every recipe against every other, too, with intervals that hold together",
    )
    target = "what time to target is measured to: 4.4, or that of one setting, model=llama_tiny:4.4; may be repeated"
    add("--target", action="append", default=[], metavar="VALUE", help=target)
    scored = "score by AlgoPerf's rules instead: who reaches --target first, over settings, seeds and trials"
    add("--time-to-target", action="store_true", help=scored)
    trials = "with --time-to-target: keys whose values are the trials of a study (optim.learning_rate where it varies)"
    add("--trials", metavar="KEY[,KEY]", help=trials)
    output = "for compare.json and report.html (compare/ beside the runs); leaves MLflow alone"
    add("--output", type=Path, metavar="DIR", help=output)
    add_ladder_options(parser)


def _diff(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder, SWEEP/N or MLflow id")
    parser.add_argument("other", metavar="RUN", help="another")
    parser.add_argument("--all", action="store_true", help="also where the runs are kept and tracked")


def _golden(parser: ArgumentParser) -> None:
    for child in golden_actions(parser, OVERRIDES):
        add_composition(child)
        add_config_dir(child)


def _conformance(parser: ArgumentParser) -> None:
    vectors = "vectors: manifest.json and the .npz files it names"
    parser.add_argument("folder", type=Path, metavar="DIR", help=vectors)
    parser.add_argument("--eager", action="store_true", help="eager only; otherwise eager and compiled")


def _warm(parser: ArgumentParser) -> None:
    add_composition(parser)
    add_config_dir(parser)
    add_device(parser)
    parser.add_argument("--clear", action="store_true", help="remove all kernels that are kept, and compile none")


def _sync(parser: ArgumentParser) -> None:
    folders = "folders of runs or above runs, experiments, SWEEP or SWEEP/N; none: every run of the outputs folder"
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=folders)
    text = "another MLflow than the one each run was logged to"
    parser.add_argument("--tracking-uri", metavar="URI", help=text)


def _completion(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=completion.SHELLS, help='bash: eval "$(lightning-llm completion bash)"')


VERBS = {
    "train": Verb(
        "lightning_llm.cli.train:train", "train one run; -m makes it a sweep over a=1,2", _train, composes=True
    ),
    "plan": Verb(
        "lightning_llm.cli.plan:plan",
        "print what a run, or with -m a sweep, would do, without running it",
        _plan,
        composes=True,
        prints_data=True,
        prints_result=True,
    ),
    "config": Verb(
        "lightning_llm.cli.config:config",
        "print the composed config, or what a group offers",
        _config,
        composes=True,
        prints_data=True,
        prints_result=True,
    ),
    "prepare": Verb(
        "lightning_llm.cli.prepare:prepare",
        "tokenise the data of a config ahead of runs, or score its documents",
        _prepare,
        composes=True,
        prints_data=True,
    ),
    "import": Verb(
        "lightning_llm.cli.import_weights:import_weights",
        "make a folder that model.init_from takes of a Hugging Face model",
        add_import_options,
    ),
    "export": Verb(
        "lightning_llm.cli.export:export",
        "make a folder that transformers loads of a run, with a model card",
        add_export_options,
    ),
    "probe": Verb(
        "lightning_llm.cli.probe:probe",
        "what precision recipes do to the gradients of a checkpoint",
        add_probe_options,
        prints_data=True,
        explains_overrides=True,
        prints_result=True,
    ),
    "evaluate": Verb(
        "lightning_llm.cli.evaluate:evaluate",
        "validation losses and lm-eval tasks of weights that are there",
        add_evaluate_options,
        prints_data=True,
        prints_result=True,
    ),
    "generate": Verb(
        "lightning_llm.cli.generate:generate",
        "text from a run, a checkpoint or a Hugging Face folder",
        add_generate_options,
        prints_data=True,
        prints_result=True,
    ),
    "health": Verb(
        "lightning_llm.cli.health:health",
        "measure the ranks and machines of a run: links, devices, memory, disk; are numbers right, who is slow",
        _health,
        prints_data=True,
        composes=True,
        prints_result=True,
    ),
    "compare": Verb(
        "lightning_llm.cli.compare:compare",
        "the verdict over runs: lossless, lossy or inconclusive",
        _compare,
        prints_data=True,
        prints_result=True,
    ),
    "diff": Verb(
        "lightning_llm.cli.diff:diff",
        "what two runs' configs, versions and data differ in",
        _diff,
        prints_data=True,
        prints_result=True,
    ),
    "golden": Verb(
        "lightning_llm.cli.golden:golden",
        "record a recipe's first steps, or check that it still makes them",
        _golden,
        composes=True,
    ),
    "conformance": Verb(
        "lightning_llm.cli.conformance:conformance", "check the quantisers against recorded vectors", _conformance
    ),
    "warm": Verb(
        "lightning_llm.cli.warm:warm",
        "compile the emulated casts of precision recipes ahead of runs",
        _warm,
        composes=True,
    ),
    "sync": Verb(
        "lightning_llm.tracking.mlflow.sync:sync", "bring MLflow up to date with run folders that it missed", _sync
    ),
    "recipes": Verb(
        "lightning_llm.cli.recipes:recipes",
        "list the shipped recipes",
        add_config_dir,
        prints_data=True,
        prints_result=True,
    ),
    "completion": Verb(
        "lightning_llm.cli.completion:completion",
        "print the script that completes words in a shell",
        _completion,
        prints_result=True,
    ),
}
