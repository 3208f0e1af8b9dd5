"""Table of the verbs of the command line: name, help and options.

The verb NAME is the function NAME in `lightning_llm/cli/NAME.py`, imported when the verb is called.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from lightning_llm.cli import options, verdict_options

EXIT_CODES = """\
exit codes:
  0    success
  1    the run failed
  2    invalid config or input
  75   stopped by trainer.max_time or SIGUSR1; resume=auto continues the run
  129, 130, 143
       stopped by SIGHUP, SIGINT or SIGTERM; the state of the run is saved
"""


@dataclass(frozen=True)
class Verb:
    """One verb.

    Args:
        help: one-line description in the list of verbs.
        add_options: declares its options, except for `--json`.
        prints_data: whether it has the option `--json`.
        composes: whether it reads a config from overrides or from a file.
        prints_result: whether it fails if its standard output cannot be written; other verbs continue.
        explains_overrides: whether its help shows examples of overrides.
        requires_verdicts: whether its exit code depends on verdicts (--require).
    """

    help: str
    add_options: Callable[[ArgumentParser], None]
    prints_data: bool = False
    composes: bool = False
    prints_result: bool = False
    explains_overrides: bool = False
    requires_verdicts: bool = False

    @property
    def epilog(self) -> str:
        """Text below the options in its help."""
        if self.requires_verdicts:
            return verdict_options.OF_REQUIREMENTS
        return options.OVERRIDES + EXIT_CODES if self.composes or self.explains_overrides else EXIT_CODES

    @property
    def description(self) -> str:
        """Text above the options in its help."""
        return f"{self.help[0].upper()}{self.help[1:]}."

    def declare(self, parser: ArgumentParser) -> None:
        """Add all its options to `parser`."""
        self.add_options(parser)
        if self.prints_data:
            parser.add_argument("--json", action="store_true", help="print JSON instead of text")


VERBS = {
    "train": Verb(
        "train one run, or a sweep with -m",
        options.train,
        composes=True,
    ),
    "plan": Verb(
        "show what a run or a sweep would do, without running it",
        options.plan,
        composes=True,
        prints_data=True,
        prints_result=True,
    ),
    "config": Verb(
        "print the composed config, or the values of a config group",
        options.config,
        composes=True,
        prints_data=True,
        prints_result=True,
    ),
    "prepare": Verb(
        "tokenize the data of a config in advance, or score its documents",
        options.prepare,
        composes=True,
        prints_data=True,
    ),
    "import": Verb(
        "convert a Hugging Face model into a folder for model.init_from",
        options.import_weights,
    ),
    "export": Verb(
        "convert a checkpoint into a Hugging Face folder with a model card",
        options.export,
    ),
    "probe": Verb(
        "measure how precision recipes change the gradients of trained weights",
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
        "check and benchmark the ranks and machines of a run: devices, links, memory, disk",
        options.health,
        prints_data=True,
        composes=True,
        prints_result=True,
    ),
    "compare": Verb(
        "judge runs against a baseline: lossless, lossy or inconclusive",
        verdict_options.compare,
        prints_data=True,
        prints_result=True,
        requires_verdicts=True,
    ),
    "ladder": Verb(
        "fit the cost of recipes over model sizes and token counts, and predict larger sizes",
        verdict_options.ladder,
        prints_data=True,
        prints_result=True,
    ),
    "algoperf": Verb(
        "score runs by time to a target loss, by the rules of AlgoPerf",
        verdict_options.algoperf,
        prints_data=True,
        prints_result=True,
    ),
    "diff": Verb(
        "show the differences of two runs: config, versions, code and data",
        options.diff,
        prints_data=True,
        prints_result=True,
    ),
    "golden": Verb(
        "record the first steps of a recipe, or check that they are reproduced",
        options.golden,
        composes=True,
    ),
    "conformance": Verb(
        "check the quantizers against recorded test vectors",
        options.conformance,
    ),
    "warm": Verb(
        "compile the emulated casts of precision recipes in advance",
        options.warm,
        composes=True,
    ),
    "sync": Verb(
        "log run folders to MLflow that it missed",
        options.sync,
    ),
    "recipes": Verb(
        "list the shipped recipes",
        options.add_config_dir,
        prints_data=True,
        prints_result=True,
    ),
    "completion": Verb(
        "print a shell's completion script",
        options.completion,
        prints_result=True,
    ),
}


def function_of(name: str) -> Callable[[Namespace], int]:
    """Import the module of a verb; return its function, which takes the parsed arguments and returns the exit code."""
    name = {"import": "import_weights"}.get(name, name)  # `import` is a keyword of Python
    function: Callable[[Namespace], int] = getattr(import_module(f"lightning_llm.cli.{name}"), name)
    return function
