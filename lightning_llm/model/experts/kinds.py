"""The mixture of experts that a config chooses: keys, parameters, memory and costs. Imports no torch.

Letters: D hidden_size, E experts, k experts per token, F inner width of one expert.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.base import Group, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from lightning_llm.config.schema.model import FEED_FORWARDS, ModelConfig
from lightning_llm.model.kinds import SwiGLU
from lightning_llm.model.spec import (
    AuxiliaryReduction,
    Distribution,
    FeedForward,
    ForwardPass,
    LinearSpec,
    MemoryPass,
    ParameterSpec,
    SavedTensor,
    Size,
    hidden,
)
from lightning_llm.model.structure import norm_of

BALANCE, ROUTER_Z = "balance", "router_z"
INNER = "model.blocks.*.feed_forward.ffn_hidden_size"


class RouterConfig(Group):
    """Scores of experts and the choice among them, for each token."""

    score: Literal["softmax", "sigmoid"] = Field("softmax", description="scores of the experts, from fp32 logits")
    normalise: bool = Field(True, description="divide the chosen scores by their sum")
    scale: PositiveFloat = Field(1.0, description="factor of the weights; DeepSeek's routed_scaling_factor")
    groups: PositiveInt | None = Field(
        None, description="groups of neighboring experts that are chosen first (DeepSeek-V3); null: none"
    )
    groups_chosen: PositiveInt | None = Field(None, description="groups that a token may choose experts from")
    bias_update_rate: PositiveFloat | None = Field(
        None,
        description="change per step of the bias that balances the choice without a loss (arXiv 2408.15664); "
        "null: no bias",
    )
    hidden_size: PositiveInt | None = Field(
        None,
        description="scores by an MLP of three linears on a projection of so many elements (ZAYA1, arXiv 2511.17127); "
        "null: by one linear",
        exclude_if=lambda size: size is None,  # models from before the key keep their hash
    )
    depth_mixing: bool = Field(
        False,
        description="add that projection of the block before, times a learned vector; needs hidden_size",
        exclude_if=lambda mixes: not mixes,
    )
    skip: bool = Field(
        False,
        description="one more choice, of no expert, which adds nothing; a bias of -1 keeps it rare at first",
        exclude_if=lambda skips: not skips,
    )


@FEED_FORWARDS.register
class MoE(FeedForward):
    """A router sends each token to `per_token` of `experts` SwiGLUs (Fedus et al. 2021, arXiv 2101.03961).

    Weights of one kind of linear lie in one matrix, expert after expert. Biases are not supported.
    """

    module: ClassVar[str] = "lightning_llm.model.experts.moe:MixtureOfExperts"
    auxiliary_losses: ClassVar[Mapping[str, AuxiliaryReduction]] = {BALANCE: "mean", ROUTER_Z: "mean"}

    why_compiled_on_request: ClassVar[str | None] = "experts run outside of the graphs (parallel.compile=true tries it)"

    kind: Literal["moe"] = "moe"
    experts: PositiveInt = Field(8, description="number of experts")
    per_token: PositiveInt = Field(2, description="experts that each token passes")
    ffn_hidden_size: PositiveInt | None = Field(
        None, description="inner width of one expert; null: model.ffn_hidden_size"
    )
    shared_experts: NonNegativeInt = Field(
        0, description="a SwiGLU of this many times ffn_hidden_size that every token passes, too"
    )
    router: RouterConfig = Field(RouterConfig(), description="scores and choice")
    balance_loss: NonNegativeFloat = Field(0.01, description="weight of the load-balancing loss; 0: none")
    z_loss: NonNegativeFloat = Field(0.001, description="weight of the router's z-loss (arXiv 2202.08906); 0: none")
    capacity_factor: PositiveFloat | None = Field(
        None,
        description="an expert takes at most this times its even share of a micro-batch's choices; null: dropless",
    )
    drop: Literal["weight", "position"] = Field(
        "weight", description="choices above the capacity that are dropped: those of smallest weight, or the last"
    )

    @property
    def choices(self) -> int:
        """Scores of a token: of the experts, and of the choice of none."""
        return self.experts + self.router.skip

    def state_given(self, model: ModelConfig) -> int:
        return self.router.hidden_size or 0

    def state_taken(self, model: ModelConfig) -> int:
        return self.state_given(model) if self.router.depth_mixing else 0

    def why_not_tensor_parallel(self, model: ModelConfig) -> str | None:
        if self.router.hidden_size is None:
            return None
        return "a router with hidden_size hands its state to the next block, which these ranks do not share"

    def inner(self, model: ModelConfig) -> int:
        """Return the inner width of one expert."""
        return self.ffn_hidden_size or model.ffn_hidden_size

    def shared(self, model: ModelConfig) -> ModelConfig:
        """Return the model whose SwiGLU is that of the shared experts."""
        return model.model_copy(update={"ffn_hidden_size": self.shared_experts * self.inner(model)})

    def linears(self, model: ModelConfig) -> list[LinearSpec]:
        key = INNER if self.ffn_hidden_size else "model.ffn_hidden_size"
        inner, count = Size(self.inner(model), key, 1, key), self.experts
        gate = LinearSpec("experts.gate_proj", "expert", inner, hidden(model), False, (), count, self.per_token)
        up = gate._replace(name="experts.up_proj", depth_scaled=("llama",))
        down = gate._replace(
            name="experts.down_proj", outputs=hidden(model), inputs=inner, depth_scaled=("gpt2", "llama")
        )
        made = [gate, up, down]
        if self.shared_experts:
            text = f"{self.shared_experts} x {key}"
            wide = Size(self.shared_experts * self.inner(model), key, self.shared_experts, text)
            for each in SwiGLU().linears(model):
                sides = (each.outputs, wide) if each.role == "row" else (wide, each.inputs)
                made.append(each._replace(name=f"shared.{each.name}", outputs=sides[0], inputs=sides[1]))
        return made

    def own_parameters(self, model: ModelConfig) -> list[ParameterSpec]:
        """Return the router's, among them biases of the choice, which no gradient moves."""
        std, hidden_size, none = Distribution(std=model.init_std), model.hidden_size, Distribution()
        if (size := self.router.hidden_size) is None:
            made = [ParameterSpec("router.weight", (self.choices, hidden_size), "replicate", std)]
        else:
            made = []
            for name, inputs in {"down_proj": hidden_size, "fc1": size, "fc2": size}.items():
                made.append(ParameterSpec(f"router.{name}.weight", (size, inputs), "replicate", std))
                made.append(ParameterSpec(f"router.{name}.bias", (size,), "replicate", none))
            made.append(ParameterSpec("router.out_proj.weight", (self.choices, size), "replicate", std))
            normed = norm_of(model).parameters_for(model, size, "replicate")
            made += [each._replace(name=f"router.norm.{each.name}") for each in normed]
            if self.router.depth_mixing:
                one = Distribution(mean=1.0)
                made.append(ParameterSpec("router.state_scale.weight", (size,), "replicate", one))
        if self.router.bias_update_rate is not None:
            made.append(ParameterSpec("router.correction", (self.experts,), "replicate", none, trained=False))
        if self.router.skip:
            rare = Distribution(mean=-1.0)
            made.append(ParameterSpec("router.skip_correction", (1,), "replicate", rare, trained=False))
        return made

    def flops_per_token(self, model: ModelConfig, sequence_length: int) -> int:
        """Return those of the router's products."""
        if (size := self.router.hidden_size) is None:
            return 6 * self.choices * model.hidden_size
        return 6 * size * (model.hidden_size + 2 * size + self.choices)

    def saved_tensors(self, model: ModelConfig, forward: ForwardPass) -> list[SavedTensor]:
        """Return the input, the router's tensors, and those of k experts: rows of all experts are k times the tokens.

        Routing is in fp32, or in fp64 for fp64 inputs; indices take 8 bytes.
        """
        width, wide, experts, k = forward.width, max(forward.width, 4), self.choices, self.per_token
        first = ("shared.gate_proj", "shared.up_proj") if self.shared_experts else ()
        kept = [SavedTensor("input", model.hidden_size, width, "gathered", linears=first, also=True)]
        if (size := self.router.hidden_size) is not None:
            normed = norm_of(model).saved_for(size, forward._replace(width=wide))
            kept += [each._replace(name=f"router's {each.name}", split="gathered") for each in normed]
            kept.append(SavedTensor("inputs and outputs of the router's linears", 5 * size, wide, "gathered"))
        kept.append(SavedTensor("scores", experts, wide, "gathered"))
        if self.router.score == "sigmoid" and self.balance_loss:
            kept.append(SavedTensor("sums of scores", 1, wide, "gathered"))
        if self.z_loss:
            kept.append(SavedTensor("logits and log-sum-exp", experts + 1, wide, "gathered"))
        kept.append(SavedTensor("chosen experts and rows", 2 * k, 8, "gathered"))
        sums = k + 1 if self.router.normalise else 0
        kept.append(SavedTensor("weights of the chosen", k + sums, wide, "gathered"))
        rows: list[tuple[str, int, tuple[str, ...]]] = []
        rows += [("experts' input", model.hidden_size, ("experts.gate_proj", "experts.up_proj"))]
        rows += [(name, self.inner(model), ()) for name in ("gate_proj's output", "activated gate", "up_proj's output")]
        rows += [("down_proj's input", self.inner(model), ("experts.down_proj",))]
        rows += [("experts' output", model.hidden_size, ())]
        kept += [SavedTensor(name, k * size, width, linears=linears) for name, size, linears in rows]
        if self.shared_experts:
            inside = SwiGLU().saved_tensors(self.shared(model), forward)[1:]
            for each in inside:
                linears = tuple(f"shared.{linear}" for linear in each.linears)
                kept.append(each._replace(name=f"shared {each.name}", linears=linears))
        return kept

    def counted_bytes(self, double: bool) -> tuple[int, int]:
        """Return what ranks that share sequences send: bytes of loads for the balance loss, bytes of choices per token.

        Only a capacity needs the choices of all tokens: int64, and if it drops by weight, the weights.
        """
        choices = 8 + (8 if double else 4) * (self.drop == "weight")
        return (
            8 * self.experts if self.balance_loss else 0,
            self.per_token * choices if self.capacity_factor is not None else 0,
        )

    def why_not_generated(self, model: ModelConfig) -> str | None:
        if self.capacity_factor is None:
            return None
        return f"capacity_factor={self.capacity_factor:g} drops choices, depending on the other tokens of a batch"

    def kernel_outputs(self, model: ModelConfig, width: int, sequence_length: int) -> int:
        """Return the bytes of the logits and of an MLP's other outputs, which products make."""
        return max(width, 4) * (self.choices + 3 * (self.router.hidden_size or 0))

    def divisions(self, model: ModelConfig) -> dict[str, tuple[int, str]]:
        found = {"model.blocks.*.feed_forward.experts": (self.experts, "each rank takes whole experts")}
        if self.shared_experts:
            found["shared_experts x ffn_hidden_size"] = (
                self.shared_experts * self.inner(model),
                "its columns are shared out evenly",
            )
        return found

    def memory_passes(self, model: ModelConfig, width: int, compiled: bool) -> list[MemoryPass]:
        """Return routing, the copies of tokens to experts and back, and the gated activation of k experts."""
        d, k, wide = model.hidden_size, self.per_token, max(width, 4)
        routing = MemoryPass(width * d + 6 * wide * self.experts, width * d + 6 * wide * self.experts, 12)
        there = MemoryPass(width * d * (1 + k), width * d * (1 + 4 * k), k)  # backward: also the sum of gate's and up's
        back = MemoryPass(width * d * (k + 1) + 2 * wide * d * k, 2 * width * d * k + 2 * wide * d * k, 3 * k)
        activation = SwiGLU().memory_passes(
            model.model_copy(update={"ffn_hidden_size": k * self.inner(model)}), width, compiled=False
        )
        shared = SwiGLU().memory_passes(self.shared(model), width, compiled) if self.shared_experts else []
        state = wide * (self.router.hidden_size or 0)
        scoring = [MemoryPass(12 * state, 20 * state, 12)] if state else []
        return [*scoring, routing, there, *activation, back, *shared]

    def problems(self, model: ModelConfig) -> Iterator[Problem]:
        """Yield numbers of experts and groups that do not fit, and biases."""
        key = "model.blocks.*.feed_forward"
        router, experts = self.router, self.experts
        if self.per_token > experts:
            text = f"is {self.per_token}, and there are {experts} experts. Use at most {experts}."
            yield Problem(f"{key}.per_token", text)
        if (router.groups is None) != (router.groups_chosen is None):
            yield Problem(f"{key}.router.groups", "needs groups_chosen, and the other way round. Give both or neither.")
        elif router.groups is not None and router.groups_chosen is not None:
            yield from self._group_problems(f"{key}.router", router.groups, router.groups_chosen)
        if router.depth_mixing and router.hidden_size is None:
            yield Problem(
                f"{key}.router.depth_mixing", "is true, and hidden_size is null. Set it, such as 256 (ZAYA1)."
            )
        if router.skip and router.groups is not None:
            yield Problem(
                f"{key}.router.skip", "is true with groups, and the choice of none is in no group. Unset one."
            )
        if model.bias:
            yield Problem("model.bias", "is true, and experts (kind: moe) have no biases. Set it to false.")

    def _group_problems(self, key: str, groups: int, chosen: int) -> Iterator[Problem]:
        each, rest = divmod(self.experts, groups)
        divisors = (str(count) for count in range(1, self.experts // 2 + 1) if self.experts % count == 0)
        remedy = f"Use one of {', '.join([*divisors, 'null'])}."
        if rest:
            yield Problem(f"{key}.groups", f"is {groups}, and does not divide experts={self.experts}. {remedy}")
        elif each < 2:
            text = f"is {groups}, which leaves one expert per group, and a group's score is the sum of its best two."
            yield Problem(f"{key}.groups", f"{text} {remedy}")
        elif chosen > groups:
            yield Problem(f"{key}.groups_chosen", f"is {chosen}, and there are {groups} groups. Use at most {groups}.")
        elif chosen * each < self.per_token:
            text = f"is {chosen}: {chosen} groups of {each} experts have {chosen * each}, and per_token="
            yield Problem(f"{key}.groups_chosen", f"{text}{self.per_token}. Use more groups or larger ones.")
