"""Settings of generated text (a task's `generation_kwargs`), read as lm-eval and its `hf` backend read them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.weight_folders import GENERATION
from lightning_llm.model.generate import Sampler

DEFAULT_NEW_TOKENS = 256
"""Number of new tokens for tasks that set none: lm-eval's default."""
DEFAULT_TOP_K = 50
"""top_k of a task that samples and sets none: the default of transformers' `generate`, which lm-eval's `hf` backend
calls."""
READ = frozenset({"do_sample", "temperature", "top_k", "top_p", "max_length", "until", "max_gen_toks"})
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "length_penalty": (1,),
    "diversity_penalty": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_p": (0,),
    "early_stopping": (False,),
    "use_cache": (True, False),
}
"""Settings of transformers' `generate` that are not implemented here, and the values by which they change no text."""


@dataclass(frozen=True)
class WritingSettings:
    """Settings of one request: the strings that end its text, how tokens are drawn, and how many at most.

    `max_length`, where given, bounds the prompt and the new tokens together, in place of `max_new_tokens`.
    """

    until: tuple[str, ...]
    sampler: Sampler
    max_new_tokens: int
    max_length: int | None

    @classmethod
    def read(cls, given: Mapping[str, Any], end_of_document: str, defaults: Mapping[str, Any]) -> "WritingSettings":
        """Return the settings that `given`, a task's `generation_kwargs`, sets.

        `defaults`: top_k and top_p of the model's own generation_config.json. Raises ValueError for invalid values.
        """
        asked = dict(normalize_gen_kwargs(dict(given), DEFAULT_NEW_TOKENS))
        _refuse_senseless(asked)
        until = handle_stop_sequences(asked["until"], eos=end_of_document)
        samples = bool(asked.get("do_sample"))
        drawn = {"top_k": DEFAULT_TOP_K, "top_p": 1.0, **defaults, **_set(asked)} if samples else {}
        sampler = Sampler(
            float(asked.get("temperature") or 0.0) if samples else 0.0,
            int(drawn["top_k"]) or None if drawn else None,
            float(drawn.get("top_p", 1.0)),
        )
        total = asked.get("max_length")
        strings = tuple(stop for stop in until if stop)
        return cls(strings, sampler, int(asked["max_gen_toks"]), None if total is None else int(total))

    def new_tokens(self, prompt_tokens: int, longest: int) -> int:
        """Return how many tokens may be generated after a prompt of `prompt_tokens` in a context of `longest` tokens.

        Raises ValueError if there is no room for any.
        """
        if self.max_length is None:
            return min(self.max_new_tokens, longest - 1)
        if (room := min(self.max_length, longest) - prompt_tokens) < 1:
            raise ValueError(f"max_length={self.max_length} leaves no room after a context of {prompt_tokens} tokens")
        return room


def _set(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in ("top_k", "top_p") if settings.get(key) is not None}


def _refuse_senseless(asked: Mapping[str, Any]) -> None:
    """Raise ValueError for values that lm-eval passes on, and on which its `hf` backend fails or depends."""
    until, samples = asked.get("until"), asked.get("do_sample")
    stops = until if isinstance(until, list) else [until]
    if odd := [each for each in stops if not isinstance(each, str | None)]:
        raise ValueError(f"until contains {odd[0]!r}: must be text")
    if asked["max_gen_toks"] < 1:
        raise ValueError(f"max_gen_toks={asked['max_gen_toks']}: must be at least 1")
    if not isinstance(samples, bool | None):
        raise ValueError(f"do_sample={samples!r}: must be true or false")
    if samples and not asked.get("temperature"):
        raise ValueError("do_sample=True requires a temperature above 0, as in transformers")


def settings_problems(given: Mapping[str, Any]) -> list[str]:
    """Return the unsupported settings of a task's `generation_kwargs` that would change its text."""
    try:
        asked = dict(normalize_gen_kwargs(dict(given), DEFAULT_NEW_TOKENS))
        WritingSettings.read(given, "", {})
    except (ValueError, TypeError) as error:
        return [f"generation_kwargs cannot be read ({error})"]
    return [
        f"generation_kwargs.{key}={value!r} is not supported"
        for key, value in asked.items()
        if key not in READ and value is not None and value not in NEUTRAL.get(key, ())
    ]


def model_defaults(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the sampling defaults of a Hugging Face folder's generation_config.json, and a note per ignored setting.

    transformers reads the file; if it is not installed, a note reports that. Raises ConfigError.
    """
    if not (folder / GENERATION).is_file():
        return {}, []
    try:
        from transformers import GenerationConfig
    except ImportError:
        return {}, [f"{folder / GENERATION} is not applied to tasks: transformers, which reads it, is not installed"]
    try:
        said = GenerationConfig.from_pretrained(folder).to_diff_dict()
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(Problem(str(folder / GENERATION), f"transformers cannot read it: {error}.")) from error
    ignored = {key: said[key] for key in NEUTRAL if said.get(key) is not None and said[key] not in NEUTRAL[key]}
    return _set(said), [
        f"{key}={value} of {folder / GENERATION} is not applied to tasks" for key, value in ignored.items()
    ]
