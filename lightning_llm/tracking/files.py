"""Files of a run's folder: `metrics.jsonl` (a JSON object per line), `summary.json`, `tokenizer.json`. No torch."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import DIGEST_BYTES, RECORDS, ChainHead, digest_problem, each_once
from lightning_llm.config.redact import redacted
from lightning_llm.config.weight_folders import TOKENIZER

Record = Mapping[str, Any]
Status = Literal["finished", "failed", "stopped"]
"""Final status of a run. Until then the status in its summary is "running"."""

SHOWN_STRETCHES = 3
"""Maximum number of ranges of missing steps in a message."""

SOURCE_HASHES = "validation_hashes"
"""Key of summary.json with the hash of each source's validation data, by name."""

RESTARTS = "restarts"
"""Key of summary.json with the list of restarts after lost ranks."""

STRAGGLER = "straggler"
"""`event` of a step at which ranks or links have become slow."""
DEAD_EXPERTS = "dead_experts"
"""`event` of a step at which experts have been without tokens for long."""
NOT_OF_LOSS = (STRAGGLER, DEAD_EXPERTS)
"""Events that, unlike others, are not about the loss."""

SUMMARY_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("status", "detail", "host", "process", "device", "run_id", "started_at", "ended_at"), str),
    **dict.fromkeys(("versions", "git", "mlflow", "precision", "fingerprint", "branch", "earlier", RECORDS), dict),
    **dict.fromkeys(("init", "validation_hashes"), dict),
    **dict.fromkeys(("data_hash", "validation_hash", "code_hash"), str),
    **dict.fromkeys(("begun_at_step", "resumed_from_step", "starts", "parameters", "seed"), int),
    "config_digest": str,
}
"""Types of the keys of summary.json that other code reads, unless they are missing or null."""

NOT_FINITE = ("NonFiniteError", "NoUpdateError")
"""Errors that end a run because of its numbers; `detail` in the summary begins with their names."""

FACTS = (
    "run_id", "begun_at_step", "seed", "config_digest",
    "data_hash", "validation_hash", "validation_hashes", "tokenizer_digest", "validation_unigram_nats",
    "skipped_samples", "rollbacks", "versions", "git", "code_hash", "device", "threads", "compiled", "backend",
    "precision", "fingerprint", "init", "distil", "branch", "earlier", "ended_by", "parameters",
)  # fmt: skip
"""Keys of `summary.json` that comparisons rely on and that do not change once the run has ended."""

END = ("status", "detail")
"""Keys that only `mark_failed` changes, if a run failed after its rank 0 had ended."""

LARGEST_STEP = 2**53
"""Largest step of a record: the largest integer that is exact as a float."""
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(record: Record) -> bytes:
    """Return `record` as one line of JSON. NaN and infinities become the strings "nan", "inf", "-inf".

    Python prints enough digits to restore the same float64, so fp32 values keep their bits.
    """
    return json.dumps(_safe(record), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the record of one line, with non-finite numbers as floats again. Raises ValueError if it is invalid."""
    try:
        text = line.decode("utf-8")  # json would guess the encoding of bytes
        record = _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("not a record: nested too deep") from error
    if not isinstance(record, dict) or type(step := record.get("step")) is not int or not 0 <= step <= LARGEST_STEP:
        raise ValueError(f"not a record: no 'step' that is an integer from 0 to {LARGEST_STEP}")
    return {key: NON_FINITE.get(value, value) if isinstance(value, str) else value for key, value in record.items()}


def number_of(record: Record, key: str, default: float = math.nan) -> float:
    """Return the number at `key` of a record as a float; `default` if it is missing. Raises ValueError for others."""
    value = record.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"'{key}' at step {record['step']} is not a number: {str(value)[:40]!r}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"'{key}' at step {record['step']} exceeds the range of a float: {value:.3e}") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"not a record: {name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=each_once)
"""Shared decoder; `json.loads` with these arguments would create one for each line."""


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in `path` in order. An incomplete last line is ignored.

    Raises ValueError with the line number if any other line is damaged.
    """
    for _, record in read_lines(path):
        yield record


def cut_back(path: Path, step: int, first: Callable[[], None] | None = None) -> int:
    """Truncate `path` to the records up to `step`, atomically; return their number.

    Called when a run has resumed from the checkpoint of `step`. Later lines may be damaged, since their steps are
    computed again. `first` is called just before the file is replaced. Raises ValueError with the line number if an
    earlier line is damaged.
    """
    kept = 0
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        for line, record in read_lines(path) if path.exists() else ():
            if record["step"] > step or not step:  # a new run validates before its first step
                break
            file.write(line)
            kept += 1
        file.flush()
        os.fsync(file.fileno())
    if first is not None:
        first()
    os.replace(partial, path)
    return kept


def damaged_record(
    path: Path, step: int, begun_at_step: int, or_earlier: bool = False, written: ChainHead | None = None
) -> str | None:
    """Return how the records up to `step` in `path` are damaged, as text; None if they are complete and unchanged.

    Args:
        path: a run's `metrics.jsonl`.
        step: last step to check.
        begun_at_step: step after which every training step must have a record.
        or_earlier: whether records may also start before that step.
        written: recorded head of the hash chain, if known.
    """
    steps: list[int] = []
    head = ChainHead()
    try:
        for line, record in read_lines(path) if path.exists() else ():
            if record["step"] > step or not step:  # a new run validates before its first step
                break
            head = head.after(line)
            if "loss" in record:
                steps.append(record["step"])
    except (OSError, ValueError) as error:
        return str(error).removeprefix(f"{path}, ")
    if or_earlier and steps:
        begun_at_step = min(begun_at_step, steps[0] - 1)
    if missing := sorted(set(range(begun_at_step + 1, step + 1)).difference(steps)):
        lacks = "has no" if path.exists() else "is missing, with the"
        return f"{lacks} record{'s' if len(missing) > 1 else ''} of {steps_in_words(missing)}"
    return written.problem(head, f" up to step {step}") if written is not None and step else None


def chain_of(path: Path) -> ChainHead:
    """Return the head of the hash chain over the complete lines of `path`. Raises ValueError as `read_records`."""
    return ChainHead.over(line for line, _ in read_lines(path)) if path.exists() else ChainHead()


def sealed_records(head: ChainHead, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of `RECORDS` for the summary of a run that has ended: the chain's `head`, and digests of facts.

    `summary`: the rest of the summary, with the facts (`FACTS`, `END`).
    """
    return {**head.as_data(), "facts": facts_digest(summary), "end": facts_digest(summary, END)}


def facts_digest(summary: Mapping[str, Any], keys: Sequence[str] = FACTS) -> str:
    """Return a digest (32 hex digits) of the values at `keys` of a summary."""
    facts = _safe({key: summary[key] for key in keys if key in summary})
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=DIGEST_BYTES).hexdigest()


def steps_in_words(steps: Sequence[int]) -> str:
    """Return ascending `steps` as text such as "steps 3-4, 7", limited to the first few ranges."""
    known = set(steps)
    firsts = [each for each in steps if each - 1 not in known]
    lasts = [each for each in steps if each + 1 not in known]
    stretches = [str(one) if one == last else f"{one}-{last}" for one, last in zip(firsts, lasts, strict=True)]
    shown, others = stretches[:SHOWN_STRETCHES], len(stretches) - SHOWN_STRETCHES
    more = f" and {others} more range{'s' if others > 1 else ''}" if others > 0 else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown)}{more}"


def summary_of(folder: Path) -> dict[str, Any]:
    """Return the content of a run's `summary.json`; {} if there is none. Raises ValueError if it is damaged."""
    file = folder / "summary.json"
    if not file.exists():
        return {}
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(summary, dict):
        raise ValueError(f"{file} is damaged: it is not a JSON object")
    for key, kind in SUMMARY_KINDS.items():
        if summary.get(key) is not None and not isinstance(summary[key], kind):
            raise ValueError(f"{file} is damaged: '{key}' is {str(summary[key])[:40]!r}")
    teachers = summary.get("distil") or []
    if not isinstance(teachers, list) or not all(isinstance(each, dict) for each in teachers):
        raise ValueError(f"{file} is damaged: 'distil' is {str(teachers)[:40]!r}")
    return summary


def ended_not_finite(summary: Mapping[str, Any]) -> bool:
    """Return whether the run ended because its loss was not finite, or its gradients until the last step.

    That is a result: the same run would end the same way again.
    """
    return summary.get("status") == "failed" and str(summary.get("detail", "")).startswith(NOT_FINITE)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` to `path` as indented JSON, atomically, also if the power fails (the file is synced first)."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(json.dumps(_safe(value), indent=2, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically: readers see the old file or the complete new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def overwrite_json(path: Path, value: Mapping[str, Any]) -> None:
    """Overwrite the existing file at `path` with `value`, for a full disk or a folder where no file can be created."""
    with path.open("r+b") as file:
        file.write(json.dumps(_safe(value), indent=2, allow_nan=False).encode() + b"\n")
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def mark_failed(folder: Path, detail: str) -> None:
    """Write to `summary.json` why the run in `folder` failed, if its rank 0 could not do so.

    Creates the summary if the run failed before it had one. Does nothing if the folder contains no run.
    """
    if (folder / "config.yaml").is_file() or (folder / "summary.json").is_file():
        before = summary_of(folder)
        summary = {**before, "status": "failed", "detail": redacted(detail)}
        if (sealed := before.get(RECORDS)) and sealed.get("end") == facts_digest(before, END):
            summary[RECORDS] = {**sealed, "end": facts_digest(summary, END)}
        write_json(folder / "summary.json", summary)


def _safe(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, list | tuple):
        return [_safe(each) for each in value]
    return {key: _safe(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield (line, record) of each complete line of `path`; see `read_records`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = decode(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is damaged: {error}") from error
            yield line, record


TOKENIZER_DIGEST = "tokenizer_digest"
"""Key of summary.json with the digest of tokenizer.json; missing in runs of earlier releases."""


def tokenizer_problem(folder: Path) -> str | None:
    """Return the problem of a run's tokenizer.json if it does not have its recorded digest; None if it does.

    None also if no digest was recorded. The text continues a sentence that begins with the file's name.

    Raises:
        ValueError: the summary is damaged.
    """
    digest = summary_of(folder).get(TOKENIZER_DIGEST)
    return digest_problem(folder / TOKENIZER, digest) if isinstance(digest, str) else None


def run_tokenizer(folder: Path) -> Path | None:
    """Return the path of a run's tokenizer.json; None if the run never had one.

    Raises:
        ConfigError: it is missing or differs from the one that the run was trained with.
    """
    try:
        problem = tokenizer_problem(folder)
    except ValueError as error:
        raise ConfigError(Problem(str(folder), f"{error}.")) from error
    if problem:
        text = f"{problem}. Restore it from a copy, or resume the run with resume=auto, which writes it again."
        raise ConfigError(Problem(str(folder / TOKENIZER), text))
    return folder / TOKENIZER if (folder / TOKENIZER).is_file() else None
