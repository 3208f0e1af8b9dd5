"""Options of the verbs that take weights which are there: `import`, `export`, `probe`, `evaluate`, `generate`."""

from argparse import SUPPRESS, ArgumentParser
from pathlib import Path

from lightning_llm.cli.arguments import add_device, add_weights_output

WEIGHTS = "a run's folder, a checkpoint, an imported or a Hugging Face folder"


def add_import_options(parser: ArgumentParser) -> None:
    """Add to `parser` the weights that are brought in."""
    add = parser.add_argument
    add("source", metavar="FOLDER_OR_NAME", help="a Hugging Face folder, or a model's name on the hub")
    add("--revision", metavar="REVISION", help="of a name on the hub: a commit, branch or tag (the newest)")
    add_weights_output(parser)


def add_export_options(parser: ArgumentParser) -> None:
    """Add to `parser` the weights that go out."""
    add = parser.add_argument
    add("path", metavar="PATH", help="a run's folder (its newest checkpoint), a checkpoint, an imported folder")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the tensors (fp32, as runs keep them)")
    add_weights_output(parser)


def add_probe_options(parser: ArgumentParser) -> None:
    """Add to `parser` what is probed, and how."""
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help=WEIGHTS)
    add("overrides", nargs="*", help="precision=NAME[,NAME...]|all, precision.KEY=..., data=...")
    add("--text", type=Path, metavar="FILE", help="documents for a Hugging Face folder: .txt, .jsonl")
    add("--batches", type=int, default=2, metavar="N", help="micro-batches to look at (2)")
    add("--keys", type=int, default=4, metavar="N", help="draws of random numbers to compare (4)")
    add("--output", type=Path, metavar="DIR", help="where to write (outputs/probe/NAME)")
    add_device(parser)


def add_evaluate_options(parser: ArgumentParser) -> None:
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


def add_generate_options(parser: ArgumentParser) -> None:
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
