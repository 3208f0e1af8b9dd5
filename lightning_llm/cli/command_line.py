"""The command line `lightning-llm VERB [overrides]`: table of its verbs, parser and dispatcher.

The verb NAME is the function NAME in `lightning_llm/cli/NAME.py`, imported when the verb is called.
"""

import argparse
import re
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import NoReturn

from lightning_llm.base import __version__
from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.base.process import slow_imports
from lightning_llm.base.terminal import OutputGoneError, escaped, lasting_output
from lightning_llm.cli import completion, options, verdict_options
from lightning_llm.cli.options import OVERRIDES
from lightning_llm.config.redact import redacted
from lightning_llm.config.workspace import open_config_dir
from lightning_llm.run.launch.environment import is_first_rank, report_unless_reported

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
    """One verb of the command line, as declared.

    Args:
        help: one-line description in the list of verbs.
        add_options: adds its options, except for `--json`, to a parser.
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


HYDRA_OPTIONS = {
    "--info": "Use `lightning-llm config --group` to list the groups, `lightning-llm config` to print the config.",
    "--hydra-help": "Use `lightning-llm VERB --help`.",
    "--package": "Use `lightning-llm config`, which prints all groups.",
    "--resolve": "`lightning-llm config` prints resolved values.",
    "--run": "Remove it.",
    "--config-path": "Use --config-dir DIR to add config groups.",
    "--config-name": "Use recipe=NAME, also for files in --config-dir DIR.",
    "--shell-completion": "Use `lightning-llm completion bash`.",
    "--experimental-rerun": "Use --config FILE with a run's config.yaml.",
}
HYDRA_OPTIONS |= {
    short: HYDRA_OPTIONS[long]
    for short, long in (
        ("-i", "--info"),
        ("-p", "--package"),
        ("-r", "--run"),
        ("-cp", "--config-path"),
        ("-cd", "--config-path"),
        ("-cn", "--config-name"),
        ("-sc", "--shell-completion"),
    )
}
"""Remedy for each option of Hydra programs that this command line does not have."""


def without_hydra_options(argv: list[str], verbs: Collection[str]) -> list[str]:
    """Return the arguments, with `VERB --cfg job` for one of `verbs` replaced by the verb `config`.

    Raises:
        ConfigError: another option of Hydra programs is given; the message names the replacement.
    """
    if not argv or argv[0] not in verbs:
        return argv
    verb, rest = argv[0], []
    arguments = iter(argv[1:])
    for word in arguments:
        option, _, value = word.partition("=")
        if option in ("--cfg", "-c"):
            value = value or next(arguments, "job")
            if value != "job":
                text = "not supported. Use `lightning-llm config` to print the config."
                raise ConfigError(Problem(f"{option} {value}", text))
            verb = "config"
        elif option in HYDRA_OPTIONS:
            raise ConfigError(Problem(option, f"this option of Hydra is not supported. {HYDRA_OPTIONS[option]}"))
        else:
            rest.append(word)
    return [verb, *rest]


COMPOSES = tuple(name for name, verb in VERBS.items() if verb.composes)


def run_verb(argv: list[str]) -> int:
    """Run the verb that the command's arguments `argv` name; return the exit code.

    Raises:
        KeyboardInterrupt: a signal stopped it; the state of a run is saved.
    """
    try:
        try:
            arguments = _parse(argv)
        except ConfigError as error:
            return _report(error)
        verb = VERBS[arguments.verb]
        with lasting_output(needed=verb.prints_result):
            try:
                open_config_dir(getattr(arguments, "config_dir", None))
                with slow_imports():
                    function = function_of(arguments.verb)
                return int(function(arguments))
            except ConfigError as error:
                return _report(error)
    except OutputGoneError as gone:
        if gone.reader_left:  # `head` or a pager has closed the pipe
            return 128 + signal.SIGPIPE
        print(f"error: {gone}", file=sys.stderr)
        return 1


class OneLineParser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit with 2."""
        if found := re.match(r"argument VERB: invalid choice: '(.*)' \(choose", message):
            word = found.group(1)
            verb = f" Use `{self.prog} train {word}`." if "=" in word else did_you_mean(word, VERBS)
            verb = f" Use `{self.prog} --help`." if word == "help" else verb
            message = f"there is no verb '{word}'.{verb}"
        self.exit(2, f"error: {message}{'' if message[-1] in '.?' else '.'} See {self.prog} --help\n")


def _parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed arguments. Overrides may precede and follow options, which argparse alone does not allow."""
    parser = _parser()
    completion.answer_shell(parser)
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(2)
    arguments, rest = parser.parse_known_args(without_hydra_options(argv, COMPOSES))
    if rest and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in rest)):
        dashed = hasattr(arguments, "overrides") and any(re.fullmatch(r"--?[\w.-]+(=.*)?", word) for word in rest)
        hint = f". Overrides have no dashes: key=value{_meant(rest)}" if dashed else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]  # a new list, since the old one may be the parser's default
    return arguments


def _meant(options: list[str]) -> str:
    """Return hints for options with the names of other trainers' options: the key of the same setting here."""
    from lightning_llm.config.schema.aliases import known_elsewhere

    names = (word.lstrip("-").partition("=")[0] for word in options if word.startswith("-"))
    return "".join(f". {name}:{hint}" for name in names if (hint := known_elsewhere(name)))


@cache
def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="lightning-llm",
        description="Train and compare LLM pre-training recipes: model size x parallel layout x precision x data mix.",
        epilog=OVERRIDES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lightning-llm {__version__}")
    verbs = parser.add_subparsers(title="verbs", dest="verb", required=True, metavar="VERB")
    for name, verb in VERBS.items():
        raw = argparse.RawDescriptionHelpFormatter
        child = verbs.add_parser(
            name, help=verb.help, description=verb.description, epilog=verb.epilog, formatter_class=raw
        )
        verb.declare(child)
    return parser


def _report(error: ConfigError) -> int:
    count = len(error.problems)
    lines = [f"{count} problem{'s' if count > 1 else ''} with the config or its inputs"]
    lines += [f"  - {escaped(redacted(str(problem)))}" for problem in error.problems]
    if is_first_rank():
        print(f"error: {lines[0]}", *lines[1:], sep="\n", file=sys.stderr, flush=True)
    else:
        report_unless_reported("\n".join(lines))
    return 2
