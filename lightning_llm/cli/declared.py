"""The verbs of the command line, each declared once: its name, its help and its options.

The verb NAME is the function NAME in `lightning_llm/cli/NAME.py`, which is imported when the verb is called.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from lightning_llm.cli import options

EXIT_CODES = (
    "exit codes: 0 done, 1 the run failed, 2 the config or an input is wrong, "
    "75 stopped by trainer.max_time or SIGUSR1, to go on, 129/130/143 stopped by SIGHUP, SIGINT or SIGTERM, all with "
    "state saved"
)


@dataclass(frozen=True)
class Verb:
    """One verb.

    Args:
        help: its line in the list of verbs.
        add_options: declares its options, except for `--json`.
        prints_data: it takes `--json`.
        composes: it reads a config from overrides or from a file.
        prints_result: it fails where its standard output cannot be written; other verbs continue.
        explains_overrides: its help shows what overrides look like.
    """

    help: str
    add_options: Callable[[ArgumentParser], None]
    prints_data: bool = False
    composes: bool = False
    prints_result: bool = False
    explains_overrides: bool = False

    @property
    def epilog(self) -> str:
        """The text below its help."""
        return options.OVERRIDES + EXIT_CODES if self.composes or self.explains_overrides else EXIT_CODES

    def declare(self, parser: ArgumentParser) -> None:
        """Add all its options to `parser`."""
        self.add_options(parser)
        if self.prints_data:
            parser.add_argument("--json", action="store_true", help="print data instead of text")


VERBS = {
    "train": Verb(
        "train one run; -m makes it a sweep over a=1,2",
        options.train,
        composes=True,
    ),
    "plan": Verb(
        "print what a run, or with -m a sweep, would do, without running it",
        options.plan,
        composes=True,
        prints_data=True,
        prints_result=True,
    ),
    "config": Verb(
        "print the composed config, or what a group offers",
        options.config,
        composes=True,
        prints_data=True,
        prints_result=True,
    ),
    "prepare": Verb(
        "tokenise the data of a config ahead of runs, or score its documents",
        options.prepare,
        composes=True,
        prints_data=True,
    ),
    "import": Verb(
        "convert a Hugging Face model to a folder for model.init_from",
        options.import_weights,
    ),
    "export": Verb(
        "convert a run to a folder for transformers, with a model card",
        options.export,
    ),
    "probe": Verb(
        "measure how precision recipes change the gradients of a checkpoint",
        options.probe,
        prints_data=True,
        explains_overrides=True,
        prints_result=True,
    ),
    "evaluate": Verb(
        "measure validation losses and lm-eval tasks of trained weights",
        options.evaluate,
        prints_data=True,
        prints_result=True,
    ),
    "generate": Verb(
        "generate text from a run, a checkpoint or a Hugging Face folder",
        options.generate,
        prints_data=True,
        prints_result=True,
    ),
    "health": Verb(
        "measure the ranks and machines of a run: links, devices, memory, disk; are numbers right, who is slow",
        options.health,
        prints_data=True,
        composes=True,
        prints_result=True,
    ),
    "compare": Verb(
        "judge runs against a baseline: lossless, lossy or inconclusive",
        options.compare,
        prints_data=True,
        prints_result=True,
    ),
    "ladder": Verb(
        "fit what recipes cost in tokens over model sizes and token counts; predict larger sizes, grade predictions",
        options.ladder,
        prints_data=True,
        prints_result=True,
    ),
    "algoperf": Verb(
        "score runs by AlgoPerf's rules: who reaches a target first",
        options.algoperf,
        prints_data=True,
        prints_result=True,
    ),
    "diff": Verb(
        "print how two runs' configs, versions and data differ",
        options.diff,
        prints_data=True,
        prints_result=True,
    ),
    "golden": Verb(
        "record a recipe's first steps, or check that it still makes them",
        options.golden,
        composes=True,
    ),
    "conformance": Verb(
        "check the quantisers against recorded vectors",
        options.conformance,
    ),
    "warm": Verb(
        "compile the emulated casts of precision recipes ahead of runs",
        options.warm,
        composes=True,
    ),
    "sync": Verb(
        "bring MLflow up to date with run folders that it missed",
        options.sync,
    ),
    "recipes": Verb(
        "list the shipped recipes",
        options.add_config_dir,
        prints_data=True,
        prints_result=True,
    ),
    "completion": Verb(
        "print the script that completes words in a shell",
        options.completion,
        prints_result=True,
    ),
}


def function_of(name: str) -> Callable[[Namespace], int]:
    """Import the module of a verb; return its function, which takes the parsed arguments and returns the exit code."""
    name = {"import": "import_weights"}.get(name, name)  # `import` is a keyword of Python
    function: Callable[[Namespace], int] = getattr(import_module(f"lightning_llm.cli.{name}"), name)
    return function
