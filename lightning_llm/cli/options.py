"""Options of every verb. All are declared at each start, so this module imports nothing slow.

Options shared by several verbs come first, then one function per verb, named like the verb.
"""

from argparse import SUPPRESS, ArgumentParser
from pathlib import Path
from typing import Any

from lightning_llm.cli.completion import SHELLS, complete_group, complete_override
from lightning_llm.golden import FALSE_ALARMS, STEPS
from lightning_llm.plan.memory import ACCOUNTINGS, OURS

WEIGHTS = "a run's folder, a checkpoint, an imported or a Hugging Face folder"
CODE_FORMATS = ("nvfp4", "mxfp4", "fp8", "int4")
"""Keys of `run.code_weights.CODES`."""
OVERRIDES = """\
overrides use Hydra's syntax, for example:
  recipe=quickstart precision=fp32 trainer.max_steps=200 run.name=mine

"""
GOLDEN_EXIT_CODES = """\
exit codes:
  0    recorded, or equal to the recorded steps
  1    different, or the run failed
  2    invalid config or input
"""


def add_composition(parser: ArgumentParser) -> None:
    """Add the options from which a config is composed: overrides, `--config FILE` and `--config-dir DIR`."""
    overrides: Any = parser.add_argument("overrides", nargs="*", help="Hydra overrides: KEY=VALUE, GROUP=NAME, ~KEY")
    overrides.completer = complete_override
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="start from a run's config.yaml instead of the defaults"
    )
    add_config_dir(parser)


def add_config_dir(parser: ArgumentParser) -> None:
    """Add `--config-dir DIR`, the user's folder of config groups and callbacks."""
    text = "folder of your own config groups (DIR/recipe/mine.yaml) and callbacks (DIR/callbacks/mine.py)"
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help=text)


def add_multirun(parser: ArgumentParser) -> None:
    """Add `-m`, which makes a sweep with one run per combination of values."""
    text = "sweep: one run for each combination of comma-separated values (a=1,2)"
    parser.add_argument("-m", "--multirun", action="store_true", help=text)


def add_weights_output(parser: ArgumentParser) -> None:
    """Add `--output` (the folder of converted weights), `--force` and `--no-parity`."""
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="folder to create; it appears only when it is complete")
    add("--force", action="store_true", help="replace DIR if it already contains weights")
    add("--no-parity", action="store_true", help="skip the comparison of logits with transformers")


def add_device(parser: ArgumentParser) -> None:
    """Add `--device`, the device to compute on."""
    text = "device to compute on (default: auto, a GPU if there is one)"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=text)


def train(parser: ArgumentParser) -> None:
    """Add the options of `train`."""
    add_composition(parser)
    add_multirun(parser)


def plan(parser: ArgumentParser) -> None:
    """Add the options of `plan`."""
    add_composition(parser)
    text = "show for every precision recipe and GPU model whether it runs natively or emulated"
    parser.add_argument("--matrix", action="store_true", help=text)
    text = "run one step of each distinct rank on tensors without data, and count bytes and collectives"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = f"estimate memory as this program would, to compare with its published figures (default: {OURS.name})"
    parser.add_argument("--accounting", choices=ACCOUNTINGS, default=OURS.name, help=text)
    text = "write a Slurm batch script for the run (submit with sbatch FILE) and its config to FILE.yaml"
    parser.add_argument("--script", type=Path, metavar="FILE", help=text)
    _search(parser)
    add_multirun(parser)


def _search(parser: ArgumentParser) -> None:
    """Add the options of `plan --search`."""
    add = parser.add_argument
    text = "search for the fastest layout of `world` ranks that fits in memory; keys set on the command line are kept"
    add("--search", action="store_true", help=text)
    text = (
        "how to search: exhaustive tries every layout, galvatron also chooses recomputation block by block, pipette "
        "also places ranks by measured links (default: exhaustive)"
    )
    add("--planner", choices=("exhaustive", "galvatron", "pipette"), help=text)
    text = "bandwidths between machines or devices in GB/s, YAML or JSON; with --planner pipette"
    add("--links", type=Path, metavar="FILE", help=text)
    text = "write the fastest layout to DIR/parallel/NAME.yaml, for `train --config-dir DIR parallel=NAME`"
    add("--write", type=Path, metavar="FILE", help=text)
    add("--force", action="store_true", help="replace the file of --write")
    text = "plot step time against memory of all layouts that fit (.svg or .png)"
    add("--pareto", type=Path, metavar="FILE", help=text)
    text = "print along which axis tensor parallelism would split each weight of a Hugging Face folder"
    add("--tensor-axes", type=Path, metavar="DIR", help=text)


def config(parser: ArgumentParser) -> None:
    """Add the options of `config`."""
    add_composition(parser)
    what = parser.add_mutually_exclusive_group()
    group: Any = what.add_argument(
        "--group", nargs="?", const="", metavar="NAME", help="list the values of this group, or of all groups"
    )
    group.completer = complete_group
    what.add_argument(
        "--diff", action="store_true", help="print only the overrides of the defaults that produce this config"
    )
    add_multirun(parser)


def prepare(parser: ArgumentParser) -> None:
    """Add the options of `prepare`."""
    add_composition(parser)
    add = parser.add_argument
    text = "score documents instead: quality=SCORER, diversity=SCORER, MEASURE.KEY=VALUE (docs/howto/data_recipes.md)"
    add("--score", nargs="+", metavar="MEASURE=SCORER", help=text)
    add("--output", type=Path, metavar="FILE", help="file of the scores (default: scores.parquet)")


def import_weights(parser: ArgumentParser) -> None:
    """Add the options of `import`."""
    add = parser.add_argument
    add("source", metavar="FOLDER_OR_NAME", help="a Hugging Face folder, or the name of a model on the Hub")
    add("--revision", metavar="REVISION", help="commit, branch or tag on the Hub (default: the main branch)")
    add_weights_output(parser)


def export(parser: ArgumentParser) -> None:
    """Add the options of `export`."""
    add = parser.add_argument
    add("path", metavar="PATH", help="a run's folder (its newest checkpoint), a checkpoint or an imported folder")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="dtype of the written tensors (default: fp32)")
    text = "write the blocks' linear weights as codes, in the layout of compressed-tensors (vLLM, transformers)"
    add("--codes", choices=CODE_FORMATS, help=text)
    add_weights_output(parser)


def probe(parser: ArgumentParser) -> None:
    """Add the options of `probe`."""
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help=WEIGHTS)
    add("overrides", nargs="*", help="precision=NAME[,NAME...]|all, precision.KEY=..., data=...")
    add("--text", type=Path, metavar="FILE", help="documents to use with a Hugging Face folder: .txt or .jsonl")
    add("--batches", type=int, default=2, metavar="N", help="number of micro-batches (default: 2)")
    add("--keys", type=int, default=4, metavar="N", help="number of random draws to compare (default: 4)")
    text = "also compare channels: the largest amax over the median, by layer and operand; draws outliers.svg"
    add("--outliers", action="store_true", help=text)
    add("--output", type=Path, metavar="DIR", help="folder of the results (default: outputs/probe/NAME)")
    add_device(parser)


def evaluate(parser: ArgumentParser) -> None:
    """Add the options of `evaluate`."""
    add = parser.add_argument
    add("path", nargs="?", type=Path, metavar="PATH", help=WEIGHTS)
    add("overrides", nargs="*", help="layout to evaluate with: parallel=NAME, parallel.KEY=VALUE, trainer.devices=N")
    text = "lm-eval task, or a task's .yaml file; A,B or repeat for several"
    add("--tasks", action="append", default=[], metavar="TASK", help=text)
    add("--tasks-only", action="store_true", help="skip validation losses")
    text = "data to use instead of the run's: jsonl=FILE, or any key below `data`"
    add("--data", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = "use the first N samples of each task; below 1, that fraction of them"
    add("--limit", type=float, metavar="N", help=text)
    text = "evaluate every checkpoint of the run PATH, without those that this request has evaluated; plots the trend"
    add("--all-checkpoints", action="store_true", help=text)
    text = "evaluate the average of these weights and PATH's"
    add("--average", nargs="+", type=Path, default=[], metavar="PATH", help=text)
    text = "evaluate the average of the predictions of these models and PATH's"
    add("--ensemble", nargs="+", type=Path, default=[], metavar="PATH", help=text)
    add(
        "--as",
        choices=CODE_FORMATS,
        dest="codes",
        help="evaluate the model that `export --codes` of this format writes",
    )
    text = "estimate the loss of combinations of data sources by averaging a sweep's one-source models (ablate/merge)"
    add("--merge", type=Path, metavar="SWEEP", help=text)
    add("--batch-size", type=int, default=8, metavar="N", help="task requests per batch (default: 8)")
    text = "compute dtype in tasks (default: the run's precision.compute_dtype)"
    add("--compute-dtype", choices=("fp32", "bf16", "fp16"), help=text)
    add_device(parser)
    add("--output", type=Path, metavar="FILE", help="file of the results (default: in the run's evaluation/)")
    add("--result", type=Path, help=SUPPRESS)  # file in which ranks return the result to their launcher


def generate(parser: ArgumentParser) -> None:
    """Add the options of `generate`."""
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help=WEIGHTS)
    add("--prompt", metavar="TEXT", help='text to continue; "" starts a new document')
    add("--chat", action="store_true", help="read lines from stdin and continue the conversation after each")
    text = "maximum number of tokens to generate (default: 200, or the room left in the context)"
    add("--max-new-tokens", type=int, metavar="N", help=text)
    text = "sampling temperature; 0 always takes the likeliest token (default: 0.8)"
    add("--temperature", type=float, default=0.8, metavar="T", help=text)
    add("--top-k", type=int, default=50, metavar="K", help="sample from the K likeliest tokens; 0: all (default: 50)")
    text = "sample from the fewest tokens with total probability P (default: 1, all)"
    add("--top-p", type=float, default=1.0, metavar="P", help=text)
    add("--seed", type=int, default=0, metavar="N", help="random seed of sampling (default: 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be repeated")
    text = "token that ends a document (default: from the weights' files, or a common name)"
    add("--end-of-document", metavar="TOKEN", help=text)
    text = "compute dtype of activations (default: the run's precision.compute_dtype)"
    add("--compute-dtype", choices=("fp32", "bf16", "fp16"), help=text)
    add_device(parser)


def health(parser: ArgumentParser) -> None:
    """Add the options of `health`."""
    add_composition(parser)
    add = parser.add_argument
    text = "YAML file of minimum values: gemm.bf16.tflops: 60%%, all_reduce.bus_gb_per_second: 300, ..."
    add("--fail-below", type=Path, metavar="FILE", help=text)
    text = "report ranks that are slower than the others by more than this fraction (default: 0.1)"
    add("--slower-than", type=float, default=0.1, metavar="SHARE", help=text)
    text = "check only as much as trainer.health=true does: no pairs of ranks, no disk"
    add("--short", action="store_true", help=text)
    text = "folder of cluster/measured.yaml and links.yaml (default: run.root/health)"
    add("--output", type=Path, metavar="DIR", help=text)


def diff(parser: ArgumentParser) -> None:
    """Add the options of `diff`."""
    parser.add_argument("run", metavar="RUN", help="run folder, SWEEP/N or MLflow id")
    parser.add_argument("other", metavar="RUN", help="the run to compare it with")
    parser.add_argument("--all", action="store_true", help="also show keys of storage and tracking")


def golden(parser: ArgumentParser) -> None:
    """Add the actions `record` and `check`, each with its own options and those of a config."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="record|check")
    for name, text, add_own in (
        ("record", "run a recipe's first steps and write them with their provenance to a golden file", _golden_record),
        ("check", "rerun the recorded steps and report the first step and parameter that differ", _golden_check),
    ):
        epilog, formatter = OVERRIDES + GOLDEN_EXIT_CODES, parser.formatter_class
        child = actions.add_parser(name, help=text, description=text, epilog=epilog, formatter_class=formatter)
        add_composition(child)
        child.add_argument("--file", type=Path, metavar="FILE", help="the golden file (default: golden/RECIPE.json)")
        child.add_argument("--json", action="store_true", help="print JSON instead of text")
        add_own(child)


def _golden_record(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=STEPS, metavar="N", help=f"number of steps (default: {STEPS})")
    text = "extra runs to measure the tolerance band from (default: 0, compare bits only)"
    add("--repeats", type=int, default=0, metavar="N", help=text)
    text = "perturb the weights of repeats by rounding errors, for a band that holds on other machines"
    add("--nudge", action="store_true", help=text)
    add("--force", action="store_true", help="replace the golden file")
    add("--result", type=Path, help=SUPPRESS)  # file in which ranks return the result to their launcher
    add("--nudged-by", type=int, help=SUPPRESS)


def _golden_check(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, metavar="N", help="check only the first N recorded steps (default: all)")
    add("--band", action="store_true", help="allow the recorded band even where bits can be compared")
    text = f"probability that a check of an unchanged program fails; sets the band's width (default: {FALSE_ALARMS})"
    add("--false-alarms", type=float, default=FALSE_ALARMS, metavar="P", help=text)
    text = "also compare if the recipe differs from the recorded one, and print the differences"
    add("--allow-differences", action="store_true", help=text)


def conformance(parser: ArgumentParser) -> None:
    """Add the options of `conformance`."""
    text = "folder of test vectors: manifest.json and the .npz files that it lists"
    parser.add_argument("folder", type=Path, metavar="DIR", help=text)
    parser.add_argument("--eager", action="store_true", help="check only eager mode, not compiled mode")


def warm(parser: ArgumentParser) -> None:
    """Add the options of `warm`."""
    add_composition(parser)
    add_device(parser)
    parser.add_argument("--clear", action="store_true", help="delete all cached kernels and compile none")


def sync(parser: ArgumentParser) -> None:
    """Add the options of `sync`."""
    text = "run folder or a folder above it, experiment, SWEEP or SWEEP/N (default: the outputs folder)"
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=text)
    text = "MLflow to log to (default: the one each run was logged to)"
    parser.add_argument("--tracking-uri", metavar="URI", help=text)


def completion(parser: ArgumentParser) -> None:
    """Add the options of `completion`."""
    text = 'shell to print the script for; in bash: eval "$(lightning-llm completion bash)"'
    parser.add_argument("shell", choices=SHELLS, help=text)
