"""Tokens to text as they come: no half characters, and nothing of what may yet turn out to be a stop string."""

from collections.abc import Sequence

from lightning_llm.data.tokens.token_text import REPLACEMENT
from lightning_llm.data.tokens.tokenizer import Tokenizer

CONTEXT_TOKENS = 8


class TextStream:
    """Gives the text of tokens piece by piece; the pieces together are what `Tokenizer.decode` says of all of them.

    A character may take several tokens: it comes with the last of them. Each piece is decoded behind the one before,
    since a decoder may treat what begins a text otherwise. (`tokenizers.DecodeStream` does so, too, and has no way to
    say what is left in the end.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        """`prompt`: the tokens before the first, which are not shown."""
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-CONTEXT_TOKENS:])
        self._shown = len(self._tokens)

    def add(self, token: int) -> str:
        """Return what text can be shown with `token`, "" where a character is not whole yet."""
        self._tokens.append(token)
        return self._next(whole=False)

    def finish(self) -> str:
        """Return what was held back: bytes that are no character, as U+FFFD."""
        return self._next(whole=True)

    def _next(self, *, whole: bool) -> str:
        before = self._tokenizer.decode(self._tokens[: self._shown])
        text = self._tokenizer.decode(self._tokens)
        if len(text) <= len(before) or (text.endswith(REPLACEMENT) and not whole):
            return ""
        self._tokens = self._tokens[self._shown :]
        self._shown = len(self._tokens)
        return text[len(before) :]


class StopStrings:
    """Passes text on up to that of `stops`, none of them empty, which is complete first; of several, the longest."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that came, if one has."""

    def add(self, text: str) -> str:
        """Return what of the text so far is before a stop string, whatever comes next, and was not returned yet."""
        if self.found is not None:
            return ""
        self._held += text
        found = [(place + len(stop), place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            _, place, self.found = min(found)
            shown, self._held = self._held[:place], ""
            return shown
        keep = max((self._begun(stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """Return what was held back, where nothing more comes."""
        shown, self._held = self._held, ""
        return shown

    def _begun(self, stop: str) -> int:
        """Return how many characters at the end of what is held begin `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
