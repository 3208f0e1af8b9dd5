"""Run lm-eval's tasks on our own models. Only this module and `task_settings` import `lm_eval`, on request."""

import contextlib
import difflib
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, nn
from torch.distributed import ReduceOp

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.data.tokens.text_stream import StopStrings, TextStream
from lightning_llm.data.tokens.tokenizer import Tokenizer
from lightning_llm.evaluate.task_settings import WritingSettings, settings_problems
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.generate import CachedLogits, RecomputedLogits, sampled
from lightning_llm.model.loss import IGNORED_LABEL
from lightning_llm.parallel.dp_shard import reshard
from lightning_llm.parallel.gathered_logits import whole_vocabulary
from lightning_llm.train.parallel_model import ParallelModel

Pair = tuple[tuple[str, str], list[int], list[int]]
"""A request of lm-eval, the tokens of its context, and the tokens of the continuation to score."""


class OwnModel(TemplateLM):
    """Adapter of a model to lm-eval's model interface, which asks for likelihoods of texts and for generated text.

    Likelihoods are computed in batches of `batch_size` requests.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        device: torch.device,
        batch_size: int,
        ends: Collection[int] = (),
        defaults: Mapping[str, Any] | None = None,
    ):
        """`model`: a `Decoder` or an `Ensemble` of some in this process, or a `ParallelModel`.

        `ends`: tokens that end a text, in addition to the tokenizer's end of a document. `defaults`: see
        `model_defaults`.

        If ranks share the model, each rank has this object and gets the same requests.
        """
        super().__init__()
        self.parallel = model if isinstance(model, ParallelModel) else ParallelModel.in_this_process(model)
        self.model: Any = self.parallel.model if self.parallel.layout.mesh is None else self.parallel.whole
        self.own_tokenizer, self.batch_size = tokenizer, batch_size
        self.target, self.ends, self.defaults = device, frozenset(ends), dict(defaults or {})
        self._noted = False
        self.max_length: int = self.model.config.max_sequence_length
        self.vocab_size: int = self.model.config.vocab_size

    @property
    def eot_token_id(self) -> int:
        return self.own_tokenizer.end_of_document

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return [int(token) for token in self.own_tokenizer.encode_batch([string])[0]]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Return (sum of its tokens' log-probabilities, whether every token was the likeliest) for each continuation.

        A text that is too long for the context loses its first tokens, as in lm-eval's own models.
        """
        asked = [
            Continuation((list(context) + list(rest))[-(self.max_length + 1) :], len(rest))
            for _, context, rest in requests
        ]
        return continuation_scores(self.parallel, asked, self.batch_size, self.eot_token_id, self.target)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text: of every token once, the first one after an end-of-document token."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            made = [(None, *make_disjoint_window(window)) for window in cut]
            counts.append(len(made))
            windows += made
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate text after the context of each request, up to the first of its `until` strings; return the texts.

        As in lm-eval's `hf` backend, a text is that of the new tokens alone, without special tokens.
        """
        eos = self.own_tokenizer.decode([self.eot_token_id])
        asked = [
            self._prompt(context, WritingSettings.read(settings, eos, self.defaults))
            for context, settings in (request.args for request in requests)
        ]
        generator = torch.Generator(self.target).manual_seed(0)  # one for all: a document may come several times
        written = [self._write(*each, generator) for each in asked]
        for sync in self.parallel.syncs:
            reshard(sync.model)
        return written

    def _prompt(self, context: str, settings: WritingSettings) -> tuple[list[int], int, WritingSettings]:
        """Return the tokens of a context, cut at its beginning to fit, and how many may be written."""
        tokens = self.tok_encode(context) or [self.eot_token_id]
        kept = self.max_length - settings.max_new_tokens
        if kept < 1:  # lm-eval's own backend fails here
            kept = 1 if settings.max_length is None else self.max_length - 1
            if not self._noted:
                text = f"asks for {settings.max_new_tokens} new tokens, but the context is {self.max_length} tokens"
                print(f"note   a task {text}: prompts are cut to their last {kept} tokens", file=sys.stderr)
                self._noted = True
        try:
            return tokens[-kept:], settings.new_tokens(len(tokens[-kept:]), self.max_length), settings
        except ValueError as error:
            raise ConfigError(Problem("--tasks", f"generation_kwargs: {error}. Raise it.")) from error

    @torch.no_grad()
    def _write(self, prompt: list[int], count: int, settings: WritingSettings, generator: torch.Generator) -> str:
        logits: CachedLogits | RecomputedLogits = RecomputedLogits(self.model)
        if isinstance(self.model, Decoder):
            with contextlib.suppress(ValueError):  # a mixer that keeps no cache
                logits = CachedLogits(self.model, 1, len(prompt) + count)
        first = torch.tensor([prompt], device=self.target)
        drawn = sampled(logits, first, self.vocab_size, settings.sampler, generator)
        stream, stops = TextStream(self.own_tokenizer, prompt), StopStrings(settings.until)
        new: list[int] = []
        for _ in range(count):
            token = int(next(drawn))
            if token == self.eot_token_id or token in self.ends:
                break
            new.append(token)
            stops.add(stream.add(token))
            if stops.found is not None:
                break
        text = self.own_tokenizer.decode(new, skip_special=True)
        return str(postprocess_generated_text(text, list(settings.until), None))


@dataclass(frozen=True)
class Continuation:
    """A text to score: `tokens` of context and continuation together, of which the last `scored` are scored.

    At most one token more than the model's sequence length, because the last token is only predicted.
    """

    tokens: list[int]
    scored: int


@torch.no_grad()
def continuation_scores(
    parallel: ParallelModel, asked: Sequence[Continuation], batch_size: int, padding: int, device: torch.device
) -> list[tuple[float, bool]]:
    """Return (sum of the log-probabilities of its scored tokens, whether every one was the likeliest) for each text.

    Batches of `batch_size` texts are distributed to the data-parallel ranks. `padding`: token that fills up a batch.
    Collective: every rank passes the same texts and gets all results.
    """
    layout = parallel.layout
    longest_first = sorted(range(len(asked)), key=lambda index: -len(asked[index].tokens))
    batches = [longest_first[start : start + batch_size] for start in range(0, len(asked), batch_size)]
    found = torch.zeros(len(asked), 2, dtype=torch.float64, device=device)  # log-probability; tokens not the likeliest
    for first in range(0, len(batches), layout.degrees.dp):
        own = first + layout.dp_rank
        # A rank that has no batch left takes part in gathering parameters all the same.
        batch = batches[min(own, len(batches) - 1)]
        scores = _batch_scores(parallel, [asked[index] for index in batch], padding, device)
        if scores is not None and own < len(batches):
            found[torch.tensor(batch, device=device)] = scores
    layout.reduce(found, ReduceOp.SUM, "dp", "sequence", "layers")
    for sync in parallel.syncs:
        reshard(sync.model)  # forward passes without a backward leave parameters gathered
    return [(log_p, others == 0) for log_p, others in found.tolist()]


def _batch_scores(
    parallel: ParallelModel, batch: Sequence[Continuation], padding: int, device: torch.device
) -> Tensor | None:
    """Return `[B, 2]`, of this rank's tokens; None where it has no logits."""
    rows = [torch.tensor(each.tokens) for each in batch]
    tokens = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True, padding_value=padding)  # [B, T]
    labels = torch.full_like(tokens, IGNORED_LABEL)  # [B, T]
    for row, each, its in zip(rows, batch, labels, strict=True):
        count = min(each.scored, len(row) - 1)
        its[len(row) - 1 - count : len(row) - 1] = row[len(row) - count :]
    room = -tokens.shape[1] % parallel.token_multiple
    tokens, labels = F.pad(tokens, (0, room), value=padding), F.pad(labels, (0, room), value=IGNORED_LABEL)
    sharded = parallel.sequence_sharder(tokens.to(device), labels.to(device), None)
    own, labels, positions, documents = sharded
    logits = parallel.logits(own, positions, documents)  # [B, T / C, V / R]
    if logits is None:
        return None
    scored = labels != IGNORED_LABEL  # [B, T / C], equal on ranks that share the vocabulary
    scores = torch.zeros(len(batch), 2, dtype=torch.float64, device=device)
    if not scored.any():
        return scores
    vocab_size = parallel.model.config.vocab_size
    picked = whole_vocabulary(logits[scored][None], parallel.layout)[0, :, :vocab_size].float()  # [N, vocab_size]
    counts, targets = scored.sum(-1).tolist(), labels[scored]  # [B], [N]
    for index, (its, wanted) in enumerate(zip(picked.split(counts), targets.split(counts), strict=True)):
        log_p = F.log_softmax(its, dim=-1).gather(-1, wanted[:, None])  # [count, 1]
        scores[index, 0] = log_p.sum().double()
        scores[index, 1] = (its.argmax(-1) != wanted).sum()
    return scores


class Tasks:
    """Loaded tasks, by the names `words`: lm-eval's own, or tasks of the user in `files` ({name: .yaml file})."""

    def __init__(self, words: Sequence[str], files: Mapping[str, Path]):
        """Raises ConfigError with all words that are not tasks, or that name a task or data that cannot be loaded."""
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        problems: list[Problem] = []
        # The index of its thousands of tasks takes lm-eval half a minute.
        self.manager = TaskManager(include_defaults=len(files) < len(words))
        known = set(self.manager.all_tasks)
        for word in words:
            if word not in files and word not in known:
                near = difflib.get_close_matches(word, known, n=3)
                hint = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
                text = f"lm-eval has no task '{word}'.{hint} For a task of yours, name its .yaml."
                problems.append(Problem("--tasks", text))
        self.names = [str(files.get(word, word)) for word in words]
        for word in self.names if not problems else ():
            try:
                problems += _settings_problems(self.manager.load([word])["tasks"])
            # Whatever a task's file or the loading of its data set raises.
            except Exception as error:
                text = f"{word} cannot be loaded: {type(error).__name__}: {error}".splitlines()[0][:400]
                problems.append(Problem("--tasks", f"{text}"))
        if problems:
            raise ConfigError(problems)

    def metrics(self, model: OwnModel, limit: float | None) -> dict[str, dict[str, Any]]:
        """Run the tasks and return `results` as entries of an evaluation file.

        Each has `of` in addition: the version of the task and the number of samples. `limit`: as in `results`.
        """
        samples = _samples_text(limit)
        found = self.results(model, limit)
        return {name: {**each, "of": f"version {each['version']}, {samples}"} for name, each in found.items()}

    def results(self, model: OwnModel, limit: float | None) -> dict[str, dict[str, Any]]:
        """Run the tasks and return {"TASK/METRIC": its `value`, `stderr`, `higher_is_better`, `samples`, `version`}.

        `stderr` is None if lm-eval reports none. A metric after a filter of lm-eval is called "TASK/METRIC,FILTER".
        Only the first rank of a machine gets results from lm-eval; the others return {}. `limit`: number of samples per
        task, a share of them below 1, or None for all.
        """
        everything: Any = simple_evaluate(
            model, tasks=list(self.names), limit=limit, task_manager=self.manager, log_samples=False,
            bootstrap_iters=1000,
        )  # fmt: skip
        found: dict[str, dict[str, Any]] = {}
        if everything is None:
            return found
        for task, values in everything["results"].items():
            better = everything["higher_is_better"].get(task, {})
            samples = everything.get("n-samples", {}).get(task, {}).get("effective")
            for key, value in values.items():
                metric, _, filtered = key.partition(",")
                if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
                    continue
                error = values.get(f"{metric}_stderr,{filtered}")
                found[f"{task}/{metric if filtered == 'none' else key}"] = {
                    "value": float(value),
                    "stderr": float(error) if isinstance(error, int | float) else None,
                    "higher_is_better": bool(better.get(metric, True)),
                    "samples": samples,
                    "version": everything.get("versions", {}).get(task),
                }
        return found


def _samples_text(limit: float | None) -> str:
    if limit is None:
        return "all samples"
    return f"the first {limit:g} of the samples" if limit < 1 else f"the first {limit:.0f} samples"


def _settings_problems(tasks: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the generation settings of tasks that are not supported."""
    for name, task in tasks.items():
        given = getattr(getattr(task, "config", None), "generation_kwargs", None)
        for problem in settings_problems(given) if given and task.OUTPUT_TYPE == "generate_until" else ():
            text = f"{name}: {problem}. Text is written greedily, or sampled by temperature, top_k and top_p."
            yield Problem("--tasks", text)
