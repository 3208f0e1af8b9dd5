"""Options of the verbs that judge runs: `compare`, `ladder` and `algoperf`. Imports nothing slow, see `options`."""

from argparse import SUPPRESS, ArgumentParser
from pathlib import Path

OF_REQUIREMENTS = """\
exit codes:
  0    verdicts are given; with --require: met by every arm
  1    with --require: not met by an arm (lossy)
  2    invalid input, or not all runs could be judged
  3    with --require: open (inconclusive); of several arms the worst counts: 1, then 3, then 0
"""


def compare(parser: ArgumentParser) -> None:
    """Add the options of `compare`, with the flags of earlier releases."""
    add = parser.add_argument
    _add_runs(parser, "the last sweep")
    _add_logs(parser)
    _add_terms(parser)
    text = "also compare every arm with every other, with simultaneous intervals"
    add("--all-pairs", action="store_true", help=text)
    text = "target value of the time-to-target table: 4.4, or model=llama_tiny:4.4 for one setting; may be repeated"
    add("--target", action="append", default=[], metavar="VALUE", help=text)
    _add_output(
        parser,
        "folder of compare.json and report.html; nothing is logged to MLflow (default: compare/ by the runs)",
    )
    text = "set the exit code by the verdicts: 0 met by every arm, 1 not met, 3 open; each look spends error"
    add("--require", metavar="lossless|not-lossy", help=text)
    text = "name or .json file of the series of looks that share one error budget (default: the looks at these runs)"
    add("--series", metavar="NAME", help=text)
    text = "looks planned, which share the budget equally (default: each spends half of the rest)"
    add("--looks", type=int, metavar="N", help=text)
    add("--json-schema", action="store_true", help="print the JSON Schema of --json and end")
    # Flags of earlier releases that are verbs now.
    add("--ladder", action="store_true", help=SUPPRESS)
    _add_predictions(parser, hidden=True)
    add("--time-to-target", action="store_true", help=SUPPRESS)
    add("--trials", metavar="KEY[,KEY]", help=SUPPRESS)


def ladder(parser: ArgumentParser) -> None:
    """Add the options of `ladder`."""
    _add_runs(parser, "the newest ladder")
    _add_predictions(parser)
    _add_terms(parser)
    _add_output(
        parser,
        "folder of compare.json and report.html; nothing is logged to MLflow (default: compare/ladder/ by the runs)",
    )


def algoperf(parser: ArgumentParser) -> None:
    """Add the options of `algoperf`."""
    add = parser.add_argument
    _add_runs(parser, "the last sweep")
    text = "target value: 4.4, or model=llama_tiny:4.4 for one setting; may be repeated"
    add("--target", action="append", default=[], metavar="VALUE", help=text)
    _add_baseline(parser)
    text = "keys that tell the trials of a study apart (default: optim.learning_rate if it varies)"
    add("--trials", metavar="KEY[,KEY]", help=text)
    add("--metric", metavar="KEY", help="validation metric to score (default: val_loss)")
    _add_output(parser, "folder of time_to_target.json (default: compare/ by the runs)")


def _add_runs(parser: ArgumentParser, default: str) -> None:
    text = f"run folder or a folder above it, experiment, SWEEP, SWEEP/N or MLflow id (default: {default})"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=text)


def _add_logs(parser: ArgumentParser) -> None:
    """Add the options for logs of other trainers."""
    add = parser.add_argument
    text = "compare logs of any trainer instead of runs: files, folders of TensorBoard events, MLflow runs"
    add("--from", dest="logs", nargs="+", default=[], metavar="ARM/SEED=PATH", help=text)
    text = "arm and seed in the paths of --from that have no label: '{arm}-{seed}.jsonl'"
    add("--pattern", metavar="NAME", help=text)
    text = "axis of the logs: step, tokens or a column (default: step if all have it, else tokens)"
    add("--x", metavar="COLUMN", help=text)
    add("--format", metavar="NAME", help="format of all logs of --from (default: detected from each)")
    text = "tokens of one step of all logs, where they count only steps"
    add("--tokens-per-step", type=float, metavar="N", help=text)
    add("--until", type=float, metavar="X", help="last step, or other x, of the logs to compare (default: their end)")


def _add_baseline(parser: ArgumentParser) -> None:
    text = "arm that all others are compared with, e.g. precision=bf16"
    parser.add_argument("--baseline", metavar="KEY=VALUE", help=text)


def _add_terms(parser: ArgumentParser) -> None:
    """Add the terms of a verdict."""
    add = parser.add_argument
    _add_baseline(parser)
    add(
        "--best-of",
        metavar="KEY",
        help="compare each arm at its best value of KEY (optim.learning_rate), chosen on separate seeds",
    )
    text = (
        "seeds that choose the value of --best-of and are excluded from the verdict (default: the lowest); all: use "
        "all seeds for both"
    )
    add("--choose-by", metavar="SEEDS", help=text)
    text = "largest gap that counts as lossless, in nats or in extra tokens, e.g. 2%% (default: the sweep's, or 0.01)"
    add("--margin", metavar="NATS|N%", help=text)
    add(
        "--confidence",
        type=float,
        metavar="P",
        help="joint confidence of all intervals (default: the sweep's, or 0.95)",
    )
    add(
        "--metric",
        metavar="KEY",
        help="validation metric to compare: val_loss or val_loss/SOURCE (default: the sweep's, or val_loss); with "
        "--from the column",
    )
    add(
        "--tail",
        type=float,
        metavar="SHARE",
        help="fraction of the last steps to average the metric over (default: the sweep's, or 0.1)",
    )


def _add_predictions(parser: ArgumentParser, *, hidden: bool = False) -> None:
    """Add the options for predictions from a ladder; `hidden` leaves them out of the help."""

    def add(flag: str, text: str, **settings: object) -> None:
        parser.add_argument(flag, help=SUPPRESS if hidden else text, **settings)  # type: ignore[arg-type]

    text = "predict the gaps at a larger size and save the prediction: model=NAME data.tokens=NUMBER"
    add("--predict", text, nargs="+", metavar="KEY=VALUE")
    text = "how far beyond the ladder to allow predictions, in powers of ten (default: 1)"
    add("--beyond", text, type=float, metavar="DECADES")
    add("--grade", "grade saved predictions against the runs that exist now", action="store_true")
    text = "file of saved predictions (default: compare/predictions.jsonl by the runs)"
    add("--ledger", text, type=Path, metavar="FILE")


def _add_output(parser: ArgumentParser, text: str) -> None:
    parser.add_argument("--output", type=Path, metavar="DIR", help=text)
