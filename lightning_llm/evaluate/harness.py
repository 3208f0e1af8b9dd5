"""lm-eval's tasks over our own weights. The one file that imports `lm_eval`, and only when it is asked for."""

import contextlib
import difflib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lightning_llm.data.text_stream import StopStrings, TextStream
from lightning_llm.data.tokenizer import Tokenizer
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.evaluate.scoring import Continuation, continuation_scores
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.generate import CachedLogits, RecomputedLogits, Sampler, sampled
from lightning_llm.parallel.fully_shard import reshard
from lightning_llm.train.parallel_model import ParallelModel

Pair = tuple[tuple[str, str], list[int], list[int]]
"""A request, and the tokens of its context and of the continuation to score."""
DEFAULT_NEW_TOKENS = 256
"""Where a task does not say how much it wants written: lm-eval's own default."""


class OwnModel(TemplateLM):
    """A model of ours as lm-eval sees one: likelihoods and greedy text, in batches of `batch_size` requests."""

    def __init__(self, model: Any, tokenizer: Tokenizer, device: torch.device, batch_size: int):
        """`model`: a `Decoder` or an `Ensemble` of some in this process, or a `ParallelModel`.

        Of a model that ranks share each rank has this, is asked the same, and answers the same.
        """
        super().__init__()
        self.parallel = model if isinstance(model, ParallelModel) else ParallelModel.in_this_process(model)
        self.model: Any = self.parallel.model if self.parallel.layout.mesh is None else self.parallel.whole
        self.own_tokenizer, self.batch_size = tokenizer, batch_size
        self.target = device
        self.max_length: int = self.model.config.max_sequence_length
        self.vocab_size: int = self.model.config.vocab_size

    @property
    def eot_token_id(self) -> int:
        return self.own_tokenizer.end_of_document

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return [int(token) for token in self.own_tokenizer.encode_batch([string])[0]]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Return of each continuation the sum of its tokens' log-probabilities, and whether each was the likeliest.

        What is too long for the context loses its first tokens, as in lm-eval's own models.
        """
        asked = [
            Continuation((list(context) + list(rest))[-(self.max_length + 1) :], len(rest))
            for _, context, rest in requests
        ]
        return continuation_scores(self.parallel, asked, self.batch_size, self.eot_token_id, self.target)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, every token once, behind the end of a document."""
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
        """Return what the model writes after each context, up to the first of its `until` strings."""
        written = [self._write(*request.args) for request in requests]
        for sync in self.parallel.syncs:
            reshard(sync.model)
        return written

    @torch.no_grad()
    def _write(self, context: str, settings: Mapping[str, Any]) -> str:
        asked = settings.get("until") or []
        until = [asked] if isinstance(asked, str) else [stop for stop in asked if stop]
        count = min(int(settings.get("max_gen_toks", DEFAULT_NEW_TOKENS)), self.max_length - 1)
        temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
        prompt = (self.tok_encode(context) or [self.eot_token_id])[-(self.max_length - count) :]
        length = len(prompt) + count
        logits: CachedLogits | RecomputedLogits = RecomputedLogits(self.model)
        if isinstance(self.model, Decoder):
            with contextlib.suppress(ValueError):  # a mixer that keeps no cache
                logits = CachedLogits(self.model, 1, length)
        generator = torch.Generator(self.target).manual_seed(0)
        first = torch.tensor([prompt], device=self.target)
        drawn = sampled(logits, first, self.vocab_size, Sampler(temperature), generator)
        stream, stops = TextStream(self.own_tokenizer, prompt), StopStrings(until)
        text = ""
        for _ in range(count):
            token = int(next(drawn))
            if token == self.eot_token_id:
                break
            text += stops.add(stream.add(token))
            if stops.found is not None:
                return text
        return text + stops.add(stream.finish()) + stops.finish()


class Tasks:
    """The tasks of `words`, loaded: names of lm-eval's, but for those that `files` has, the user's own (.yaml)."""

    def __init__(self, words: Sequence[str], files: Mapping[str, Path]):
        """Raises ConfigError with every word that names no task or whose task cannot be loaded, data included."""
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        problems: list[Problem] = []
        # The index of its thousands of tasks takes lm-eval half a minute.
        self.manager = TaskManager(include_defaults=len(files) < len(words))
        known = set(self.manager.all_tasks)
        for word in words:
            if word not in files and word not in known:
                near = difflib.get_close_matches(word, known, n=3)
                hint = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
                problems.append(Problem("--tasks", f"lm-eval has no task '{word}'.{hint} A task of yours: its .yaml."))
        self.words = [str(files.get(word, word)) for word in words]
        for word in self.words if not problems else ():
            try:
                self.manager.load([word])
            # Whatever a task's file or the loading of its data set raises.
            except Exception as error:
                text = f"{word} cannot be loaded: {type(error).__name__}: {error}".splitlines()[0][:400]
                problems.append(Problem("--tasks", f"{text}"))
        if problems:
            raise ConfigError(problems)

    def results(self, model: OwnModel, limit: int | None) -> dict[str, dict[str, Any]]:
        """Return by "TASK/METRIC": its `value`, `stderr` (None where there is none), `higher_is_better` and `samples`.

        A metric behind another filter than none is called "TASK/METRIC,FILTER". Of ranks lm-eval gives them to a
        machine's first alone; others have none.
        """
        everything: Any = simple_evaluate(
            model, tasks=list(self.words), limit=limit, task_manager=self.manager, log_samples=False,
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
