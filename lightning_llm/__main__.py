"""The command line: `lightning-llm VERB [hydra overrides]`. A verb's module is imported when the verb is called."""

import argparse
import importlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import lightning_llm
from lightning_llm.config.config_dir import open_config_dir
from lightning_llm.config.hydra_options import without_hydra_options
from lightning_llm.config.redact import redact_uri
from lightning_llm.errors import ConfigError, Terminated, did_you_mean
from lightning_llm.run.environment import is_first_rank
from lightning_llm.terminal.text import escaped
from lightning_llm.verb import completion

WEIGHTS = "a run's folder, a checkpoint, an imported or a Hugging Face folder"
VERBS = {
    "train": ("lightning_llm.verb.train:train", "train one run; -m makes it a sweep over a=1,2"),
    "plan": ("lightning_llm.verb.plan:plan", "print what a run, or with -m a sweep, would do, without running it"),
    "config": ("lightning_llm.verb.config:config", "print the composed config, or what a group offers"),
    "import": (
        "lightning_llm.verb.import_weights:import_weights",
        "make a folder that model.init_from takes of a Hugging Face model",
    ),
    "export": ("lightning_llm.verb.export:export", "make a folder that transformers loads of a run, with a model card"),
    "probe": ("lightning_llm.probe.verb:probe", "what precision recipes do to the gradients of a checkpoint"),
    "evaluate": (
        "lightning_llm.verb.evaluate:evaluate",
        "validation losses and lm-eval tasks of weights that are there",
    ),
    "generate": ("lightning_llm.verb.generate:generate", "text from a run, a checkpoint or a Hugging Face folder"),
    "compare": ("lightning_llm.compare.command:compare", "the verdict over runs: lossless, lossy or inconclusive"),
    "diff": ("lightning_llm.compare.command:diff", "what two runs' configs, versions and data differ in"),
    "conformance": ("lightning_llm.verb.conformance:conformance", "check the quantisers against recorded vectors"),
    "sync": ("lightning_llm.record.mlflow.sync:sync", "bring MLflow up to date with run folders that it missed"),
    "recipes": ("lightning_llm.verb.recipes:recipes", "list the shipped recipes"),
    "completion": ("lightning_llm.verb.completion:completion", "print the script that completes words in a shell"),
}

COMPOSES = ("train", "plan", "config")
"""The verbs that compose a config from overrides, or read one."""
OVERRIDES = "overrides are Hydra's: recipe=quickstart precision=fp32 trainer.max_steps=200 run.name=mine\n"
EXIT_CODES = (
    "exit codes: 0 done, 1 the run failed, 2 the config or an input is wrong, "
    "130/143 stopped by a signal with state saved"
)


def main(argv: list[str] | None = None) -> int:
    """Run one verb; return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        arguments = _parse(words)
        module, _, function = VERBS[arguments.verb][0].partition(":")
        open_config_dir(getattr(arguments, "config_dir", None))
        code = int(getattr(importlib.import_module(module), function)(arguments))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _report(error)
    except BrokenPipeError:  # whoever reads this (head, a pager) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as stop:
        number = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
        what = "; no step was under way, and what is saved stays as it is" if words[:1] == ["train"] else ""
        print(f"stopped by {number.name}{what}", file=sys.stderr)
        return 128 + number


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all else here does."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit with 2."""
        if found := re.match(r"argument VERB: invalid choice: '(.*)' \(choose", message):
            word = found.group(1)
            verb = f" Write {self.prog} train {word}." if "=" in word else did_you_mean(word, VERBS)
            verb = f" Write {self.prog} --help." if word == "help" else verb
            message = f"there is no verb '{word}'.{verb}"
        self.exit(2, f"error: {message}{'' if message[-1] in '.?' else '.'} See {self.prog} --help\n")


def _parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed words. Overrides may stand on both sides of an option, which argparse alone refuses."""
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
        arguments.overrides += rest
    return arguments


def _meant(options: list[str]) -> str:
    """Return what options that are written as other trainers' are called here."""
    from lightning_llm.config.schema.aliases import known_elsewhere

    names = (word.lstrip("-").partition("=")[0] for word in options if word.startswith("-"))
    return "".join(f". {name}:{hint}" for name in names if (hint := known_elsewhere(name)))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="lightning-llm",
        description="Compare LLM pre-training recipes: model size x parallel layout x precision x data mix.",
        epilog=OVERRIDES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lightning-llm {lightning_llm.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, (_, text) in VERBS.items():
        epilog = OVERRIDES + EXIT_CODES if verb in (*COMPOSES, "probe") else EXIT_CODES
        child = verbs.add_parser(
            verb, help=text, description=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if verb in COMPOSES:
            overrides: Any = child.add_argument(
                "overrides", nargs="*", help="Hydra overrides: key=value, group=name, ~key"
            )
            overrides.completer = completion.complete_override
            child.add_argument("--config", type=Path, metavar="FILE", help="repeat a run from its config.yaml")
        if verb == "config":
            _add_config(child)
        if verb == "completion":
            child.add_argument("shell", choices=completion.SHELLS, help='bash: eval "$(lightning-llm completion bash)"')
        if verb in (*COMPOSES, "recipes"):
            child.add_argument(
                "--config-dir",
                type=Path,
                metavar="DIR",
                help="further config groups, DIR/recipe/mine.yaml, and callbacks, DIR/callbacks/mine.py",
            )
        if verb == "plan":
            child.add_argument(
                "--matrix", action="store_true", help="every precision recipe on every kind of GPU: native or emulated"
            )
        if verb in ("train", "plan"):
            child.add_argument("-m", "--multirun", action="store_true", help="one run for each combination of a=1,2")
        if verb == "probe":
            _add_probe(child)
        if verb in ("import", "export"):
            _add_weights(child, verb)
        if verb == "evaluate":
            _add_evaluate(child)
        if verb == "generate":
            _add_generate(child)
        if verb == "conformance":
            child.add_argument(
                "folder", type=Path, metavar="DIR", help="vectors: manifest.json and the .npz files it names"
            )
            child.add_argument("--eager", action="store_true", help="eager only; otherwise eager and compiled")
        if verb == "compare":
            _add_compare(child)
        if verb == "diff":
            child.add_argument("run", metavar="RUN", help="a run's folder, SWEEP/N or MLflow id")
            child.add_argument("other", metavar="RUN", help="another")
            child.add_argument("--all", action="store_true", help="also where the runs are kept and tracked")
        if verb == "sync":
            text = "folders of runs or above runs, experiments, SWEEP or SWEEP/N; none: every run of the outputs folder"
            child.add_argument("folders", nargs="*", metavar="FOLDER", help=text)
            child.add_argument(
                "--tracking-uri", metavar="URI", help="another MLflow than the one each run was logged to"
            )
        if verb in ("plan", "config", "probe", "evaluate", "generate", "recipes", "compare", "diff"):
            child.add_argument("--json", action="store_true", help="print data instead of text")
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    group: Any = what.add_argument(
        "--group", nargs="?", const="", metavar="NAME", help="a group's values, one line each; without NAME all groups"
    )
    group.completer = completion.complete_group
    what.add_argument("--diff", action="store_true", help="the overrides that make it of the defaults")


def _add_probe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help=WEIGHTS)
    parser.add_argument("overrides", nargs="*", help="precision=NAME[,NAME...]|all, precision.KEY=..., data=...")
    parser.add_argument("--text", type=Path, metavar="FILE", help="documents for a Hugging Face folder: .txt, .jsonl")
    parser.add_argument("--batches", type=int, default=2, metavar="N", help="micro-batches to look at (2)")
    parser.add_argument("--keys", type=int, default=4, metavar="N", help="draws of random numbers to compare (4)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write (outputs/probe/NAME)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def _add_weights(parser: argparse.ArgumentParser, verb: str) -> None:
    add = parser.add_argument
    if verb == "import":
        add("source", metavar="FOLDER_OR_NAME", help="a Hugging Face folder, or a model's name on the hub")
        add("--revision", metavar="REVISION", help="of a name on the hub: a commit, branch or tag (the newest)")
    else:
        add("path", metavar="PATH", help="a run's folder (its newest checkpoint), a checkpoint, an imported folder")
        add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the tensors (fp32, as runs keep them)")
    add("--output", required=True, metavar="DIR", help="the folder to make; there whole, or not at all")
    add("--force", action="store_true", help="replace DIR if it holds weights already")
    add("--no-parity", action="store_true", help="leave out the comparison of logits with transformers")


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", nargs="?", type=Path, metavar="PATH", help=WEIGHTS)
    add("--tasks", action="append", default=[], metavar="TASK", help="of lm-eval, or a .yaml of your own; also A,B")
    add("--tasks-only", action="store_true", help="no validation losses")
    add("--data", action="append", default=[], metavar="KEY=VALUE", help="other data: jsonl=FILE, or a key below data")
    add("--limit", type=int, metavar="N", help="the first N samples of each task")
    add("--average", nargs="+", type=Path, default=[], metavar="PATH", help="the mean of these weights, and PATH's")
    add("--ensemble", nargs="+", type=Path, default=[], metavar="PATH", help="the mean of what these and PATH predict")
    add("--batch-size", type=int, default=8, metavar="N", help="requests of a task at once (8)")
    add("--compute-dtype", choices=("fp32", "bf16", "fp16"), help="in tasks (the run's precision.compute_dtype)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--output", type=Path, metavar="FILE", help="where to write instead of the run's evaluation/")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help=WEIGHTS)
    add("--prompt", metavar="TEXT", help='the text to go on with; "" begins a document')
    add("--chat", action="store_true", help="go on with each line of the input, and what was said before")
    add("--max-new-tokens", type=int, metavar="N", help="at most (200, or what the context has room for)")
    add("--temperature", type=float, default=0.8, metavar="T", help="divides the logits; 0: the likeliest token (0.8)")
    add("--top-k", type=int, default=50, metavar="K", help="draw among the K likeliest tokens; 0: all (50)")
    add("--top-p", type=float, default=1.0, metavar="P", help="of these, the fewest of together P (1: all)")
    add("--seed", type=int, default=0, metavar="N", help="same seed, same text (0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--compute-dtype", choices=("fp32", "bf16", "fp16"), help="of activations (the run's precision.compute_dtype)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "runs",
        nargs="*",
        metavar="RUN",
        help="folders of runs or above runs, experiments, SWEEP or SWEEP/N, MLflow ids; none: the last sweep",
    )
    add("--baseline", metavar="GROUP=LEVEL", help="what to hold the others against; also KEY=VALUE (precision=bf16)")
    add("--best-of", metavar="KEY", help="each recipe at its best value of a key (optim.learning_rate), by other seeds")
    add("--choose-by", metavar="SEEDS", help="seeds that choose with --best-of, and are not judged (the lowest)")
    add("--margin", type=float, default=0.01, metavar="NATS", help="the gap in loss that is still lossless (0.01)")
    add("--confidence", type=float, default=0.95, metavar="P", help="of all intervals together (0.95)")
    add("--metric", default="val_loss", metavar="KEY", help="of validation lines (val_loss; also val_loss/SOURCE)")
    add("--tail", type=float, default=0.1, metavar="SHARE", help="last share of the steps, averaged over (0.1)")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="for compare.json and report.html (compare/ beside the runs); leaves MLflow alone",
    )


def _report(error: ConfigError) -> int:
    if not is_first_rank():
        return 2  # one of many ranks says it
    count = len(error.problems)
    print(
        f"error: {count} problem{'s' if count > 1 else ''} with the config or its inputs",
        file=sys.stderr,
    )
    for problem in error.problems:
        print(f"  - {escaped(redact_uri(str(problem)))}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
