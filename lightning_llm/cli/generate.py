"""The verb `generate`: text from weights that are there, shown as it comes."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.base.terminal import escaped
from lightning_llm.data.tokens.text_stream import StopStrings, TextStream
from lightning_llm.data.tokens.tokenizer import Tokenizer
from lightning_llm.evaluate.weights import decoder_of, end_words, tokenizer_of
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.generate import CachedLogits, Sampler, sampled
from lightning_llm.run.subject import Subject, device_of, find_subject, read_weights

DEFAULT_NEW_TOKENS = 200
"""Where --max-new-tokens is not given: as many, or what the context has room for."""


@dataclass
class Writer:
    """Continues text after text with one model; what was said before is kept, as far as the context reaches."""

    model: Decoder
    tokenizer: Tokenizer
    sampler: Sampler
    stops: list[str]
    ends: frozenset[int]
    """The tokens after which there is no more, beside the tokenizer's end of a document."""
    generator: torch.Generator
    device: torch.device
    _pending: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin with an empty context. Raises ConfigError where a mixer keeps no cache."""
        try:
            self._logits = CachedLogits(self.model, 1, self.model.config.max_sequence_length)
        except ValueError as error:
            raise ConfigError(Problem("model.layers", f"{error}, which generating needs.")) from error
        self._pending = []

    @property
    def room(self) -> int:
        """How many more tokens the context takes."""
        return self.model.config.max_sequence_length - self._logits.cache.length - len(self._pending)

    def write(self, prompt: list[int], max_new_tokens: int, show: Callable[[str], None]) -> tuple[list[int], str]:
        """Return the new tokens after `prompt`, and why there are no more: "length", "stop" or "end_of_document".

        `show` gets their text piece by piece: whole characters, and nothing of a stop string.
        """
        stream, stops = TextStream(self.tokenizer, prompt), StopStrings(self.stops)
        new: list[int] = []
        reason = "length"
        for token in self._drawn(prompt, max_new_tokens):
            if token == self.tokenizer.end_of_document or token in self.ends:
                reason = "end_of_document"
                break
            new.append(token)
            show(stops.add(stream.add(token)))
            if stops.found is not None:
                return new, "stop"
        show(stops.add(stream.finish()))
        show(stops.finish())
        return new, reason if stops.found is None else "stop"

    def _drawn(self, prompt: list[int], count: int) -> Iterator[int]:
        start = torch.tensor([[*self._pending, *prompt]], dtype=torch.int64, device=self.device)  # [1, T]
        self._pending = []
        tokens: Iterator[Tensor] = sampled(
            self._logits, start, self.model.config.vocab_size, self.sampler, self.generator
        )
        for _ in range(count):
            token = int(next(tokens))
            self._pending = [token]  # the model has not seen it yet
            yield token


def generate(arguments: argparse.Namespace) -> int:
    """Print the prompt and what the model writes behind it, or with --chat answer line by line; return 0."""
    subject, sampler, device = _checked(arguments)
    tokenizer = tokenizer_of(subject)
    longest = subject.config.model.max_sequence_length
    prompt = [] if arguments.prompt is None else _tokens_of(arguments.prompt, tokenizer)
    problems = [
        *_prompt_problems(prompt, arguments.max_new_tokens, longest),
        *_stop_problems(arguments.stop, tokenizer),
    ]
    if problems:
        raise ConfigError(problems)
    if subject.config.trainer.threads:
        torch.set_num_threads(subject.config.trainer.threads)
    model = decoder_of(subject, read_weights(subject), device, arguments.compute_dtype or "")
    generator = torch.Generator(device).manual_seed(arguments.seed)
    ends = frozenset(subject.weights.end_tokens)
    writer = Writer(model, tokenizer, sampler, arguments.stop, ends, generator, device)
    try:
        if arguments.prompt is not None:
            _once(writer, prompt, subject, arguments)
        if arguments.chat:
            _chat(writer, arguments)
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def _checked(arguments: argparse.Namespace) -> tuple[Subject, Sampler, torch.device]:
    """Return what generates and how; raise all that is wrong at once."""
    problems: list[Problem] = []
    limits = {"--max-new-tokens": (arguments.max_new_tokens, 1), "--top-k": (arguments.top_k, 0)}
    for key, (value, least) in limits.items():
        if value is not None and value < least:
            problems.append(Problem(key, f"is {value}, must be at least {least}."))
    if not 0 <= arguments.temperature < float("inf"):
        text = f"is {arguments.temperature}, must be at least 0; 0 takes the likeliest token."
        problems.append(Problem("--temperature", text))
    if not 0 < arguments.top_p <= 1:
        problems.append(Problem("--top-p", f"is {arguments.top_p}, must be above 0 and at most 1."))
    if "" in arguments.stop:
        problems.append(Problem("--stop", "is empty, and would stop before the first token. Leave it out."))
    if not -(2**63) <= arguments.seed < 2**64:
        problems.append(Problem("--seed", f"is {arguments.seed}, must fit into 64 bits."))
    if arguments.prompt is None and not arguments.chat:
        problems.append(Problem("--prompt", "is missing. Give the text to go on with, or --chat."))
    if arguments.chat and arguments.json:
        problems.append(Problem("--json", "goes without --chat, which has no end."))
    subject = device = None
    with gathered(problems):
        device = device_of(arguments.device)
    with gathered(problems):
        subject = find_subject(arguments.path, end_words(arguments.end_of_document), None, needs_data=False)
    if problems or subject is None or device is None:
        raise ConfigError(problems)
    return subject, Sampler(arguments.temperature, arguments.top_k or None, arguments.top_p), device


def _prompt_problems(prompt: list[int], max_new_tokens: int | None, longest: int) -> Iterator[Problem]:
    """Yield what is wrong where the context has no room for the prompt and for what is asked."""
    wanted = max_new_tokens or 1
    if prompt and len(prompt) + wanted > longest:
        text = f"of {len(prompt):,} tokens and {wanted:,} new ones exceed model.max_sequence_length={longest:,}. "
        yield Problem("--prompt", text + "Shorten it, or lower --max-new-tokens.")


def _stop_problems(stops: list[str], tokenizer: Tokenizer) -> Iterator[Problem]:
    """Yield a problem for each string that no tokens of the model's decode to, so that it could never come."""
    for stop in stops:
        decoded = tokenizer.decode(tokenizer.encode_batch([stop])[0])
        if stop.strip() not in decoded:
            yield Problem("--stop", f"{stop!r} cannot come: the tokenizer writes it as {decoded!r}.")


def _tokens_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of `text`; of none, the end-of-document token, behind which a document begins."""
    return [int(token) for token in tokenizer.encode_batch([text])[0]] or [tokenizer.end_of_document]


def _once(writer: Writer, prompt: list[int], subject: Subject, arguments: argparse.Namespace) -> None:
    pieces: list[str] = []
    show = pieces.append if arguments.json else _shown
    if not arguments.json:
        _shown(arguments.prompt)
    count = min(arguments.max_new_tokens or DEFAULT_NEW_TOKENS, writer.room - len(prompt))
    began = time.perf_counter()
    new, reason = writer.write(prompt, count, show)
    seconds = time.perf_counter() - began
    if arguments.json:
        facts = {
            "path": str(subject.weights.path),
            "step": subject.step,
            "prompt": arguments.prompt,
            "text": "".join(pieces),
            "finish_reason": reason,
            "prompt_tokens": prompt,
            "new_tokens": new,
            "seed": arguments.seed,
            "temperature": arguments.temperature,
            "top_k": writer.sampler.top_k,
            "top_p": writer.sampler.top_p,
            "compute_dtype": arguments.compute_dtype or subject.config.precision.compute_dtype,
            "seconds": round(seconds, 3),
        }
        print(json.dumps(facts, indent=1, allow_nan=False))
        return
    print(flush=True)
    ended = {"length": "as many as asked for", "stop": "a stop string", "end_of_document": "the document's end"}
    if arguments.max_new_tokens is None and len(new) < DEFAULT_NEW_TOKENS:
        ended["length"] = "the context is full"
    speed = f"{len(new):,} tokens, {len(new) / seconds:,.0f} per second" if new else "no token"
    print(f"generated  {speed}; {ended[reason]}; seed {arguments.seed}", file=sys.stderr)


def _shown(text: str) -> None:
    """Print a piece at once; what a model writes may hold any byte, and a terminal would act on some."""
    if text:
        print(escaped(text) if sys.stdout.isatty() else text, end="", flush=True)


def _chat(writer: Writer, arguments: argparse.Namespace) -> None:
    """Continue the text so far by each line of the input, until it ends."""
    if sys.stdin.isatty():
        print("each line is continued, with what was said before; end with Ctrl-D", file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        prompt = _tokens_of(f"{line}\n" if line else "", writer.tokenizer)
        if len(prompt) >= writer.room:
            if len(prompt) >= writer.model.config.max_sequence_length:
                print(f"a line of {len(prompt):,} tokens is longer than the context, and left out", file=sys.stderr)
                continue
            print("the context is full: what was said before is forgotten", file=sys.stderr)
            writer.forget()
        writer.write(prompt, min(arguments.max_new_tokens or DEFAULT_NEW_TOKENS, writer.room - len(prompt)), _shown)
        print(flush=True)
