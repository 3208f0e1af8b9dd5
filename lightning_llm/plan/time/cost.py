"""What work costs: seconds by part, and the bytes that it sends. Imports no torch."""

from collections import Counter
from dataclasses import dataclass, field

from lightning_llm.plan.traffic import Sent

PARTS = (
    "gemm",
    "attention",
    "memory_bound",
    "tensor_parallel",
    "context_parallel",
    "gathers",
    "reductions",
    "optimizer",
    "bubble",
)
"""Parts of a step's seconds. `attention`: what mixers compute beside their linears. `memory_bound`: norms, activations,
rotary positions, sums, casts, the loss. `gathers`, `reductions`: what of FSDP's and of sums over ranks nothing hides.
`bubble`: waiting for other stages."""


@dataclass
class Cost:
    """Seconds by part, and bytes that a rank sends by kind of collective and axes."""

    seconds: dict[str, float] = field(default_factory=dict)
    sent: Sent = field(default_factory=Counter)

    def __add__(self, other: "Cost") -> "Cost":
        made = Cost(dict(self.seconds), Counter(self.sent))
        made.sent.update(other.sent)
        for part, value in other.seconds.items():
            made.spend(part, value)
        return made

    def __mul__(self, times: int) -> "Cost":
        seconds = {part: times * value for part, value in self.seconds.items()}
        return Cost(seconds, Counter({key: times * value for key, value in self.sent.items()}))

    def spend(self, part: str, seconds: float) -> None:
        """Add to the seconds of `part`."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values())


@dataclass
class Passes:
    """The cost of a forward pass, of a backward pass, and of what is computed again in it where it is checkpointed."""

    forward: Cost = field(default_factory=Cost)
    backward: Cost = field(default_factory=Cost)
    again: Cost = field(default_factory=Cost)

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.forward + other.forward, self.backward + other.backward, self.again + other.again)
