"""The options of every verb. Imports nothing that takes time: all of them are declared at each start.

First the options that several verbs share, then one function per verb, named as the verb.
"""

from argparse import SUPPRESS, ArgumentParser
from pathlib import Path
from typing import Any

from lightning_llm.cli.completion import SHELLS, complete_group, complete_override
from lightning_llm.golden import FALSE_ALARMS, STEPS
from lightning_llm.plan.memory.accounting import ACCOUNTINGS, OURS

WEIGHTS = "a run's folder, a checkpoint, an imported or a Hugging Face folder"
OVERRIDES = "overrides are Hydra's: recipe=quickstart precision=fp32 trainer.max_steps=200 run.name=mine\n"
GOLDEN_EXIT_CODES = (
    "exit codes: 0 recorded, or equal; 1 different, or the run failed; 2 the config or an input is wrong"
)


def add_composition(parser: ArgumentParser) -> None:
    """Add what a config is composed of: overrides or a file, and the user's folder of groups."""
    overrides: Any = parser.add_argument("overrides", nargs="*", help="Hydra overrides: key=value, group=name, ~key")
    overrides.completer = complete_override
    parser.add_argument("--config", type=Path, metavar="FILE", help="repeat a run from its config.yaml")
    add_config_dir(parser)


def add_config_dir(parser: ArgumentParser) -> None:
    """Add a user's folder of config groups and callbacks."""
    text = "further config groups, DIR/recipe/mine.yaml, and callbacks, DIR/callbacks/mine.py"
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help=text)


def add_multirun(parser: ArgumentParser) -> None:
    """Add the switch for one run per combination."""
    parser.add_argument("-m", "--multirun", action="store_true", help="one run for each combination of a=1,2")


def add_weights_output(parser: ArgumentParser) -> None:
    """Add the folder that weights are written into."""
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="the folder to make; there whole, or not at all")
    add("--force", action="store_true", help="replace DIR if it holds weights already")
    add("--no-parity", action="store_true", help="leave out the comparison of logits with transformers")


def add_device(parser: ArgumentParser) -> None:
    """Add the device to compute on."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def train(parser: ArgumentParser) -> None:
    """Add what `train` composes."""
    add_composition(parser)
    add_multirun(parser)


def plan(parser: ArgumentParser) -> None:
    """Add what is planned, and which view of it."""
    add_composition(parser)
    text = "every precision recipe on every kind of GPU: native or emulated"
    parser.add_argument("--matrix", action="store_true", help=text)
    text = "take one step of every rank that differs, on tensors without data: bytes and collectives, counted"
    parser.add_argument("--dry-run", action="store_true", help=text)
    whose = "the program that memory is counted for, to check its published figures"
    parser.add_argument("--accounting", choices=ACCOUNTINGS, default=OURS.name, help=whose)
    text = "write the run as a batch script for Slurm (sbatch FILE), with its config in FILE.yaml"
    parser.add_argument("--script", type=Path, metavar="FILE", help=text)
    _search(parser)
    add_multirun(parser)


def _search(parser: ArgumentParser) -> None:
    """Declare the options of a search."""
    add = parser.add_argument
    add("--search", action="store_true", help="the fastest layout of `world` ranks that fits; keys that are typed stay")
    planners = "every layout; with recomputation block by block; placed on measured links (exhaustive)"
    add("--planner", choices=("exhaustive", "galvatron", "pipette"), help=planners)
    add("--links", type=Path, metavar="FILE", help="for pipette: GB/s between machines, or devices, as YAML or JSON")
    add("--write", type=Path, metavar="FILE", help="the fastest as DIR/parallel/NAME.yaml, for train parallel=NAME")
    add("--force", action="store_true", help="replace the file of --write")
    add("--pareto", type=Path, metavar="FILE", help="a picture of seconds and memory, .svg or .png")
    weights = "which side of each weight of a Hugging Face folder tensor parallelism would share, by names and shapes"
    add("--tensor-axes", type=Path, metavar="DIR", help=weights)


def config(parser: ArgumentParser) -> None:
    """Add which part of the composed config is printed."""
    add_composition(parser)
    what = parser.add_mutually_exclusive_group()
    group: Any = what.add_argument(
        "--group", nargs="?", const="", metavar="NAME", help="a group's values, one line each; without NAME all groups"
    )
    group.completer = complete_group
    what.add_argument(
        "--diff", action="store_true", help="print only the overrides of the defaults that give this config"
    )
    add_multirun(parser)


def prepare(parser: ArgumentParser) -> None:
    """Add what is prepared: tokens, or scores of documents."""
    add_composition(parser)
    add = parser.add_argument
    what = "score documents instead: quality=SCORER, diversity=SCORER, MEASURE.KEY=VALUE (docs/howto/data_recipes.md)"
    add("--score", nargs="+", metavar="MEASURE=SCORER", help=what)
    add("--output", type=Path, metavar="FILE", help="where to write scores (scores.parquet)")


def import_weights(parser: ArgumentParser) -> None:
    """Add to `parser` the weights that are brought in."""
    add = parser.add_argument
    add("source", metavar="FOLDER_OR_NAME", help="a Hugging Face folder, or a model's name on the hub")
    add("--revision", metavar="REVISION", help="of a name on the hub: a commit, branch or tag (the newest)")
    add_weights_output(parser)


def export(parser: ArgumentParser) -> None:
    """Add to `parser` the weights that go out."""
    add = parser.add_argument
    add("path", metavar="PATH", help="a run's folder (its newest checkpoint), a checkpoint, an imported folder")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the tensors (fp32, as runs keep them)")
    add_weights_output(parser)


def probe(parser: ArgumentParser) -> None:
    """Add to `parser` what is probed, and how."""
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help=WEIGHTS)
    add("overrides", nargs="*", help="precision=NAME[,NAME...]|all, precision.KEY=..., data=...")
    add("--text", type=Path, metavar="FILE", help="documents for a Hugging Face folder: .txt, .jsonl")
    add("--batches", type=int, default=2, metavar="N", help="micro-batches to look at (2)")
    add("--keys", type=int, default=4, metavar="N", help="draws of random numbers to compare (4)")
    add("--output", type=Path, metavar="DIR", help="where to write (outputs/probe/NAME)")
    add_device(parser)


def evaluate(parser: ArgumentParser) -> None:
    """Add to `parser` what is evaluated, and on what."""
    add = parser.add_argument
    add("path", nargs="?", type=Path, metavar="PATH", help=WEIGHTS)
    add("overrides", nargs="*", help="ranks to share it: parallel=NAME, parallel.KEY=VALUE, trainer.devices=N")
    add("--tasks", action="append", default=[], metavar="TASK", help="of lm-eval, or a .yaml of your own; also A,B")
    add("--tasks-only", action="store_true", help="no validation losses")
    add("--data", action="append", default=[], metavar="KEY=VALUE", help="other data: jsonl=FILE, or a key below data")
    add("--limit", type=float, metavar="N", help="the first N samples of each task; 0.5: the first half of them")
    add("--average", nargs="+", type=Path, default=[], metavar="PATH", help="the mean of these weights, and PATH's")
    add("--ensemble", nargs="+", type=Path, default=[], metavar="PATH", help="the mean of what these and PATH predict")
    merged = (
        "what sets of parts of the data would give, by the mean of a sweep's models of one part each (ablate/merge)"
    )
    add("--merge", type=Path, metavar="SWEEP", help=merged)
    add("--batch-size", type=int, default=8, metavar="N", help="requests of a task at once (8)")
    add("--compute-dtype", choices=("fp32", "bf16", "fp16"), help="in tasks (the run's precision.compute_dtype)")
    add_device(parser)
    add("--output", type=Path, metavar="FILE", help="where to write instead of the run's evaluation/")
    add("--result", type=Path, help=SUPPRESS)  # where ranks leave what was measured for what started them


def generate(parser: ArgumentParser) -> None:
    """Add to `parser` what goes on with which text."""
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
    add("--end-of-document", metavar="TOKEN", help="ends a document (what the weights' files say, or a usual name)")
    add("--compute-dtype", choices=("fp32", "bf16", "fp16"), help="of activations (the run's precision.compute_dtype)")
    add_device(parser)


def health(parser: ArgumentParser) -> None:
    """Add what is measured, and the limits of it."""
    add_composition(parser)
    add = parser.add_argument
    least = "the least that figures may be: gemm.bf16.tflops: 60%%, all_reduce.bus_gb_per_second: 300, ..."
    add("--fail-below", type=Path, metavar="FILE", help=least)
    share = "a rank is named that is slower than the others by more than this share (0.1)"
    add("--slower-than", type=float, default=0.1, metavar="SHARE", help=share)
    add("--short", action="store_true", help="what trainer.health=true looks at: neither pairs of ranks nor the disk")
    add("--output", type=Path, metavar="DIR", help="for cluster/measured.yaml and links.yaml (run.root/health)")


def compare(parser: ArgumentParser) -> None:
    """Add the runs, the terms of a verdict, and the flags of earlier releases."""
    add = parser.add_argument
    _add_runs(parser, "the last sweep")
    _add_terms(parser)
    text = "compare every arm with every other, too, with simultaneous intervals"
    add("--all-pairs", action="store_true", help=text)
    text = "the value that time to target is measured to: 4.4, or of one setting, model=llama_tiny:4.4; may be repeated"
    add("--target", action="append", default=[], metavar="VALUE", help=text)
    _add_output(
        parser, "folder of compare.json and report.html (compare/ beside the runs); nothing is written to MLflow"
    )
    # Modes of earlier releases, which are verbs now.
    add("--ladder", action="store_true", help=SUPPRESS)
    _add_predictions(parser, hidden=True)
    add("--time-to-target", action="store_true", help=SUPPRESS)
    add("--trials", metavar="KEY[,KEY]", help=SUPPRESS)


def ladder(parser: ArgumentParser) -> None:
    """Add the runs, predictions and the terms of a verdict."""
    _add_runs(parser, "the newest ladder")
    _add_predictions(parser)
    _add_terms(parser)
    _add_output(
        parser, "folder of compare.json and report.html (compare/ladder/ beside the runs); nothing is written to MLflow"
    )


def algoperf(parser: ArgumentParser) -> None:
    """Add the runs, the target and the trials."""
    add = parser.add_argument
    _add_runs(parser, "the last sweep")
    text = "the value to reach: 4.4, or that of one setting, model=llama_tiny:4.4; may be repeated"
    add("--target", action="append", default=[], metavar="VALUE", help=text)
    _add_baseline(parser)
    text = "keys whose values are the trials of a study (optim.learning_rate where it varies)"
    add("--trials", metavar="KEY[,KEY]", help=text)
    add("--metric", metavar="KEY", help="the metric of validations to score (val_loss)")
    _add_output(parser, "folder of time_to_target.json (compare/ beside the runs)")


def _add_runs(parser: ArgumentParser, default: str) -> None:
    text = f"folders of runs or above runs, experiments, SWEEP or SWEEP/N, MLflow ids; none: {default}"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=text)


def _add_baseline(parser: ArgumentParser) -> None:
    text = "the arm that all others are compared with; also KEY=VALUE (precision=bf16)"
    parser.add_argument("--baseline", metavar="GROUP=LEVEL", help=text)


def _add_terms(parser: ArgumentParser) -> None:
    """Add what a verdict is asked for."""
    add = parser.add_argument
    _add_baseline(parser)
    add(
        "--best-of",
        metavar="KEY",
        help="compare each arm at its best value of KEY (optim.learning_rate), chosen by other seeds",
    )
    text = (
        "seeds that choose the value with --best-of and are left out of the verdict (the lowest); all: use all for both"
    )
    add("--choose-by", metavar="SEEDS", help=text)
    text = "the largest gap that is still lossless: in nats (as declared, or 0.01) or in extra tokens (2%%)"
    add("--margin", metavar="NATS|N%", help=text)
    add("--confidence", type=float, metavar="P", help="joint confidence of all intervals (as declared, or 0.95)")
    add(
        "--metric",
        metavar="KEY",
        help="the metric of validations to compare (as declared, or val_loss; also val_loss/SOURCE)",
    )
    add(
        "--tail",
        type=float,
        metavar="SHARE",
        help="share of the last steps that the metric is averaged over (as declared, or 0.1)",
    )


def _add_predictions(parser: ArgumentParser, *, hidden: bool = False) -> None:
    """Add what to do with a ladder beside fitting it; `hidden`: without help."""

    def add(flag: str, text: str, **settings: object) -> None:
        parser.add_argument(flag, help=SUPPRESS if hidden else text, **settings)  # type: ignore[arg-type]

    text = "predict the gaps of a larger size and record them: model=NAME data.tokens=NUMBER"
    add("--predict", text, nargs="+", metavar="KEY=VALUE")
    text = "how far beyond the ladder a prediction may be, in powers of ten (1)"
    add("--beyond", text, type=float, metavar="DECADES")
    add("--grade", "grade earlier predictions by the runs that exist now", action="store_true")
    text = "the file of predictions (compare/predictions.jsonl beside the runs)"
    add("--ledger", text, type=Path, metavar="FILE")


def _add_output(parser: ArgumentParser, text: str) -> None:
    parser.add_argument("--output", type=Path, metavar="DIR", help=text)


def diff(parser: ArgumentParser) -> None:
    """Add the two runs."""
    parser.add_argument("run", metavar="RUN", help="a run's folder, SWEEP/N or MLflow id")
    parser.add_argument("other", metavar="RUN", help="another")
    parser.add_argument("--all", action="store_true", help="also where the runs are kept and tracked")


def golden(parser: ArgumentParser) -> None:
    """Add the actions `record` and `check`, each with its own options and those of a config."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="record|check")
    for name, text, add_own in (
        ("record", "make a recipe's first steps and write them, with what made them, to a golden file", _golden_record),
        ("check", "make them anew; exit 1 with the first step and parameter that are not as recorded", _golden_check),
    ):
        epilog, formatter = OVERRIDES + GOLDEN_EXIT_CODES, parser.formatter_class
        child = actions.add_parser(name, help=text, description=text, epilog=epilog, formatter_class=formatter)
        add_composition(child)
        child.add_argument("--file", type=Path, metavar="FILE", help="the golden file (golden/RECIPE.json)")
        child.add_argument("--json", action="store_true", help="print data instead of text")
        add_own(child)


def _golden_record(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=STEPS, metavar="N", help=f"how many steps ({STEPS})")
    add("--repeats", type=int, default=0, metavar="N", help="further runs, whose scatter makes a band (0: bits alone)")
    nudge = "move the weights of repeats as far as sums round: a band for other machines"
    add("--nudge", action="store_true", help=nudge)
    add("--force", action="store_true", help="replace the golden file")
    add("--result", type=Path, help=SUPPRESS)  # where ranks leave what was measured for what started them
    add("--nudged-by", type=int, help=SUPPRESS)


def _golden_check(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, metavar="N", help="check the first N of the recorded steps (all of them)")
    add("--band", action="store_true", help="allow the measured band also where bits could be compared")
    share = f"the share of checks of an unchanged program that may fail, which sets the band's width ({FALSE_ALARMS})"
    add("--false-alarms", type=float, default=FALSE_ALARMS, metavar="P", help=share)
    add("--allow-differences", action="store_true", help="compare another recipe, too, and say what differs")


def conformance(parser: ArgumentParser) -> None:
    """Add the folder of vectors."""
    vectors = "vectors: manifest.json and the .npz files it names"
    parser.add_argument("folder", type=Path, metavar="DIR", help=vectors)
    parser.add_argument("--eager", action="store_true", help="eager only; otherwise eager and compiled")


def warm(parser: ArgumentParser) -> None:
    """Add the recipes and the device to compile for."""
    add_composition(parser)
    add_device(parser)
    parser.add_argument("--clear", action="store_true", help="remove all kernels that are kept, and compile none")


def sync(parser: ArgumentParser) -> None:
    """Add the folders to sync and where to."""
    folders = "folders of runs or above runs, experiments, SWEEP or SWEEP/N; none: every run of the outputs folder"
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=folders)
    text = "another MLflow than the one each run was logged to"
    parser.add_argument("--tracking-uri", metavar="URI", help=text)


def completion(parser: ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument("shell", choices=SHELLS, help='bash: eval "$(lightning-llm completion bash)"')
