"""The decoder: embedding -> blocks in the order of `model.layers` -> norm -> head; Llama to Gemma 2 are its configs.

Letters: B sequences, T tokens, D hidden_size, V padded vocabulary. Parameters are fp32 masters, cast where they are
used; activations, the residual stream included, are in `compute_dtype` from the embedding to the logits. No autocast.
The model knows no ranks and no number formats: it offers blocks, and a role per module that holds parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.linalg.gemm import CastOnUse, Reduce
from lightning_llm.model.attention.kernel_choice import SeenKeys, mask_of
from lightning_llm.model.attention.kinds import AttentionSpec
from lightning_llm.model.linear import Linear
from lightning_llm.model.loss import AuxiliaryLosses, LossReduction, check_declared
from lightning_llm.model.rope import rope_tables
from lightning_llm.model.stepping import (
    STEP_ROWS,
    BlockCache,
    DecoderCache,
    SteppingMixer,
    blocks_of,
    in_block,
    rows_of,
)
from lightning_llm.model.structure import block_parts, feed_forward_of, for_layers, mixer_of, norm_of, why_not_generated
from lightning_llm.model.unit_scaling import branch_input, residual_ratios, residual_sum, scaled


class AttentionKind(NamedTuple):
    """Properties of a block that decide its attention mask: the window, and whether it takes kernels.

    Blocks with equal values share one mask.
    """

    window: int | None
    takes_kernels: bool


class Block(nn.Module):
    """One layer: `x + mixer(norm(x))`, then `x + feed_forward(norm(x))`; with post_norms each is normed before the sum.

    With residual_scaling both terms of each sum are shifted and scaled, with input_scaling also the block's input.
    The mixer of any kind is called `attention`.
    """

    attention_norm: nn.Module
    attention: nn.Module
    feed_forward_norm: nn.Module
    feed_forward: nn.Module

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        own = config.block_at(index)
        self.post_norms, self.scales, self.scales_input = own.post_norms, own.residual_scaling, own.input_scaling
        mixer, network = mixer_of(config, index), feed_forward_of(config, index)
        self.recurrent, self.takes_documents = mixer.recurrent, mixer.takes_documents
        self.ratios = residual_ratios(config, index) if config.unit_scaling else None
        self.gives_state, self.takes_state = network.state_given(config) > 0, network.state_taken(config) > 0
        takes_kernels = isinstance(mixer, AttentionSpec) and mixer.takes_kernels
        self.attention_kind = AttentionKind(mixer.window_tokens(config), takes_kernels)
        self.rope_width = mixer.rope_width(config)
        for name, part in block_parts(config, index).items():
            module: Any = part.build(config)
            check_declared(module, part.auxiliary_losses)
            module.roles = part.roles(config)  # by child module, see `Decoder.roles`
            self.add_module(name, module)

    def forward(self, x: Tensor, *seen: Any, state: Tensor | None = None) -> Any:
        """Return `[B, T, D]` for `x` `[B, T, D]`; `seen`: what its mixer takes, see `model.spec.Mixer`.

        If its feed-forward network gives a state, return (that, state `[B, T, S]`); `state`: of the block before.
        """
        x = self._entered(x)
        mixed = self.attention(self.attention_norm(self._branch(0, x)), *seen)  # [B, T, D]
        return self._map(x, mixed, self.feed_forward, state)  # [B, T, D]

    def step(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: Any, rows: slice, state: Tensor | None = None
    ) -> Any:
        """Return `[B, STEP_ROWS, D]` for a block `x` of positions, or as `forward` also a state; `rows`: next tokens.

        `rope` are the tables of the block; `cache` is the mixer's.
        """
        x = self._entered(x)
        mixer: Any = self.attention
        normed = self.attention_norm(self._branch(0, x))[:, rows]  # [B, n, D]
        if isinstance(cache, BlockCache):
            mixed = cache.step(mixer, normed, rope, rows)  # [B, n, D]
        else:
            own = None if rope is None else (rope[0][rows], rope[1][rows])  # 2 x [n, 1, K/2]
            mixed = mixer.step(normed, own, cache)  # [B, n, D]
        # One whose products depend on how many tokens come at once has a method for this.
        feed_forward = getattr(self.feed_forward, "step", self.feed_forward)
        return self._map(x, in_block(mixed, rows.start), feed_forward, state)  # [B, STEP_ROWS, D]

    def _entered(self, x: Tensor) -> Tensor:
        entered: Tensor = self.get_submodule("input_scale")(x) if self.scales_input else x
        return entered

    def _branch(self, part: int, x: Tensor) -> Tensor:
        """Return the input of the norm of the mixer (`part` 0) or of the feed-forward network (1)."""
        return x if self.ratios is None else branch_input(x, self.ratios[part])

    def _map(self, x: Tensor, mixed: Tensor, feed_forward: Callable[..., Any], state: Tensor | None) -> Any:
        x = self._sum(0, x, mixed)  # [B, T, D]
        normed = self.feed_forward_norm(self._branch(1, x))
        mapped = feed_forward(normed, state) if self.takes_state else feed_forward(normed)  # [B, T, D]
        if not self.gives_state:
            return self._sum(1, x, mapped)  # [B, T, D]
        mapped, state = mapped
        return self._sum(1, x, mapped), state

    def _sum(self, part: int, x: Tensor, y: Tensor) -> Tensor:
        """Return `x + y` for the output `y` of a part; `y` normed and both scaled if the block does so."""
        if self.ratios is not None:
            return residual_sum(x, y, self.ratios[part])
        name = ("attention", "feed_forward")[part]
        if self.post_norms:
            y = self.get_submodule(f"{name}_post_norm")(y)
        if self.scales:
            x, y = self.get_submodule(f"{name}_skip_scale")(x), self.get_submodule(f"{name}_scale")(y)
        return x + y


class TokenEmbedding(CastOnUse, nn.Embedding):
    """Token embedding `[V, D]`; without a head, also the projection of hidden states to logits."""

    def project(self, x: Tensor, reduce: Reduce | None = None) -> Tensor:
        """Return logits `[B, T, V]` of `x` `[B, T, D]` with the embedding as projection, or the result of `reduce`."""
        return self.reduced(x, self.weight, None, reduce)


class Decoder(nn.Module):
    """A decoder-only transformer with the shape of `config`.

    Blocks live in `layers`, keyed by their global index as a string, so that names stay when a pipeline stage drops
    some. An early stage sets `norm` and `head` to None and returns hidden states; a later one takes them in place of
    tokens and sets `embedding` to None. With `tie_embeddings` there is no head: `embedding` projects (one parameter,
    one name), and the last stage keeps it.

    Ranks may hold a part of it: of the logits those of ids from `first_id` on, of the hidden states between blocks the
    `token_shards`-th part of the tokens.
    """

    first_id = 0
    token_shards = 1

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.embedding: TokenEmbedding | None = TokenEmbedding(config.padded_vocab_size, config.hidden_size)
        self.position_embedding: nn.Embedding | None = None
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.max_sequence_length, config.hidden_size)
        self.layers = nn.ModuleDict({str(index): Block(config, index) for index in range(config.num_layers)})
        parts = for_layers(config, range(config.num_layers), lambda index: list(block_parts(config, index).values()))
        self.auxiliary = AuxiliaryLosses(name for block in parts for part in block for name in part.auxiliary_losses)
        self.norm: nn.Module | None = norm_of(config).build(config)
        self.head: nn.Module | None = None
        if not config.tie_embeddings:
            self.head = Linear(config.hidden_size, config.padded_vocab_size, bias=False)

    def stage(self, layers: Iterable[int], first: bool, last: bool) -> "Decoder":
        """Return the part of a pipeline with the blocks `layers` (global indices), sharing its modules with this one.

        Embeddings go to the `first` part, norm and head to the `last`; with `tie_embeddings` both have the embedding.
        """
        with torch.device("meta"):
            part = Decoder(self.config.model_copy(update={"num_layers": 0}), self.compute_dtype)
        part.config, part.auxiliary = self.config, AuxiliaryLosses(self.auxiliary.names)
        part.embedding = self.embedding if first or (last and self.config.tie_embeddings) else None
        part.position_embedding = self.position_embedding if first else None
        part.layers = nn.ModuleDict({str(index): self.layers[str(index)] for index in layers})
        part.norm, part.head = (self.norm, self.head) if last else (None, None)
        return part

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        loss: LossReduction | None = None,
    ) -> Tensor:
        """Return logits `[B, T, V]` in `compute_dtype`; those of padding ids are the dtype's lowest finite number.

        `tokens` is int64 `[B, T]`, or for a later stage hidden states `[B, T, D]`; an early stage returns those.
        `positions` int64 `[B, T]` default to 0..T-1. With `document_ids` `[B, T]`, mixers stay within tokens of
        equal id. With `loss`, the loss of the logits is returned, which are not there whole if they are many. Raises
        ValueError where T exceeds `max_sequence_length`.
        """
        length = tokens.shape[1] * (self.token_shards if tokens.is_floating_point() else 1)
        if length > self.config.max_sequence_length:
            raise ValueError(f"{length} tokens exceed model.max_sequence_length={self.config.max_sequence_length}")
        if positions is None:
            positions = torch.arange(length, device=tokens.device)  # [T]
        blocks: list[Any] = list(self.layers.values())
        kinds = {block.attention_kind for block in blocks if not block.recurrent}
        masks = {
            kind: mask_of(self.seen_keys(positions, document_ids, kind.window), kind.takes_kernels) for kind in kinds
        }
        rope = self._rope_by_width(positions)
        x = tokens if tokens.is_floating_point() else self.embed(tokens, positions)  # [B, T, D]
        state = None
        for block in blocks:
            seen: tuple[Any, ...]
            seen = (None, document_ids) if block.recurrent else (rope[block.rope_width], masks[block.attention_kind])
            seen += (document_ids,) if block.takes_documents else ()
            y = block(x, *seen, state=state) if block.takes_state else block(x, *seen)
            y, state = y if block.gives_state else (y, None)
            x = self.auxiliary.attach(x, y, block)  # [B, T, D]
        return x if self.norm is None else self.project(self.norm(x), loss)  # [B, T, V] or []

    def new_cache(self, batch_size: int, length: int) -> DecoderCache:
        """Return an empty cache for `step`, for `batch_size` sequences of at most `length` tokens.

        Raises ValueError if a mixer has no cache, results depend on a token's batch, or `length` exceeds
        `max_sequence_length`.
        """
        if length > self.config.max_sequence_length:
            raise ValueError(f"{length} tokens exceed model.max_sequence_length={self.config.max_sequence_length}")
        if (why := why_not_generated(self.config)) is not None:
            raise ValueError(why)
        made = {}
        for name, block in self.blocks.items():
            mixer: Any = block.attention
            if not isinstance(mixer, SteppingMixer):
                raise ValueError(f"{name}: a mixer of {type(mixer).__name__} has no cache of earlier tokens")
            cache = mixer.new_cache(batch_size, length)
            made[name] = cache if getattr(mixer, "steps_in_blocks", False) else BlockCache(cache)
        return DecoderCache(made, batch_size, length)

    def step(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """Return logits `[B, n, V]` of the next n `tokens`, int64 `[B, n]`, after those that `cache` has seen.

        The bits do not depend on how many tokens come at once, see `model.stepping`. For a whole decoder, without
        gradients. Raises ValueError where the cache is full.
        """
        first = cache.length
        if first + tokens.shape[1] > cache.longest or tokens.shape[0] != cache.batch_size:
            made, asked = f"{cache.batch_size} x {cache.longest}", f"{tokens.shape[0]} x {first + tokens.shape[1]}"
            raise ValueError(f"the cache has room for {made} tokens, but {asked} were given")
        logits = []
        for start, stop in blocks_of(first, tokens.shape[1]):
            logits.append(self._step_in_block(tokens[:, start - first : stop - first], start, cache))
            cache.length = stop
        return torch.cat(logits, dim=1)  # [B, n, V]

    def _step_in_block(self, tokens: Tensor, start: int, cache: DecoderCache) -> Tensor:
        rows, device = rows_of(start, start + tokens.shape[1]), tokens.device
        every = torch.arange(start - rows.start, start - rows.start + STEP_ROWS, device=device)  # [STEP_ROWS]
        rope = self._rope_by_width(every)
        x = self.embed(in_block(tokens, start), every.clamp(max=self.config.max_sequence_length - 1))
        blocks: dict[str, Any] = dict(self.blocks)
        state = None
        for name, block in blocks.items():
            y = block.step(x, rope[block.rope_width], cache.mixers[name], rows, state)
            x, state = y if block.gives_state else (y, None)  # [B, STEP_ROWS, D]
        if self.norm is None:
            raise ValueError("a pipeline stage cannot decode step by step")
        return self.project(self.norm(x))[:, rows]  # [B, n, V]

    def _rope_by_width(self, positions: Tensor) -> dict[int, tuple[Tensor, Tensor] | None]:
        """Return the tables `[.., T, 1, K/2]` for each number K of elements that some block rotates; None for 0."""
        blocks: list[Any] = list(self.layers.values())
        rotates = self.config.position == "rope"
        widths = dict.fromkeys(block.rope_width for block in blocks)
        return {each: rope_tables(self.config, positions, each) if rotates and each else None for each in widths}

    def seen_keys(self, positions: Tensor, document_ids: Tensor | None, window: int | None) -> SeenKeys | None:
        """Return the keys each query sees: those of its document within the last `window` tokens.

        Return None if plain causal attention suffices: no documents, and no window shorter than the sequence.
        """
        length = positions.shape[-1]
        if document_ids is None and (window is None or window >= length):
            return None
        every = torch.arange(length, device=positions.device)  # [T]
        return SeenKeys.from_positions(every, every, document_ids, window)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return `[B, T, D]` in `compute_dtype`: the rows of `tokens`, scaled, plus those of `positions` if learned."""
        if self.embedding is None:
            raise ValueError("this stage has no embedding: pass hidden states [B, T, D], not tokens")
        x = self.embedding(tokens)  # [B, T, D]
        if self.config.embedding_scale == "sqrt_hidden_size":
            x = x * self.config.hidden_size**0.5  # [B, T, D]
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)  # [B, T, D]
        return x.to(self.compute_dtype)

    def project(self, x: Tensor, loss: LossReduction | None = None) -> Tensor:
        """Return the logits `[B, T, V]` of normed hidden states `x` `[B, T, D]`, by the head or the tied embedding.

        Or their loss.
        """
        if self.config.unit_scaling:
            x = scaled(x, backward=self.config.vocab_size**-0.5)
        if self.head is not None:
            project: Any = self.head
        elif self.embedding is not None:
            project = self.embedding.project
        else:
            raise ValueError("this stage has a final norm, but neither a head nor the embedding for the logits")
        return self._finish(project(x)) if loss is None else project(x, loss.after(self._finish))

    def _finish(self, logits: Tensor) -> Tensor:
        """Return logits `[.., V]` of the projection as the model has them: capped, and without those of padding ids."""
        if self.config.unit_scaling:
            logits = scaled(logits, forward=1 / self.config.hidden_size)
        if (cap := self.config.logit_cap) is not None:
            logits = torch.tanh(logits / cap) * cap  # [B, T, V]
        return mask_padding(logits, self.config.vocab_size, self.first_id)

    @property
    def blocks(self) -> Mapping[str, nn.Module]:
        """The blocks in order, by their full names ("layers.0", ...)."""
        return {f"layers.{index}": block for index, block in self.layers.items()}

    def roles(self) -> dict[str, str]:
        """Return how each module that holds parameters may be sharded over a tensor-parallel group, by full name.

        "column": rows of the weight (outputs) are split, "row": its columns (inputs), "vocabulary": rows are token
        ids, "replicate": every rank holds it whole, "per_head": every rank holds it whole and applies it to its own
        heads, so that its gradient there is a part of a sum; "duplicate": a linear within a part that every rank holds
        whole and applies to all tokens, for "column" linears that take its outputs, so that its gradient is whole.
        """
        roles = {
            "embedding": "vocabulary",
            "position_embedding": "replicate",
            "norm": "replicate",
            "head": "vocabulary",
        }
        roles = {name: role for name, role in roles.items() if getattr(self, name) is not None}
        for name, block in self.blocks.items():
            for part, module in block.named_children():
                inner = getattr(module, "roles", None)
                roles |= (
                    {f"{name}.{part}.{key}": role for key, role in inner.items()}
                    if inner
                    else {f"{name}.{part}": "replicate"}
                )
        return roles


def mask_padding(logits: Tensor, vocab_size: int, first_id: int = 0) -> Tensor:
    """Return `logits` `[..., V]` with those of ids >= `vocab_size` at the dtype's lowest finite number.

    In place, except for a view: FSDP2's hooks on module outputs would lose it.

    `first_id` is the token id of the first column, for a shard of the vocabulary. A softmax gives the padding exactly
    zero, so losses and gradients are those of the unpadded model.
    """
    real = max(vocab_size - first_id, 0)
    if real < logits.shape[-1]:
        logits = logits.clone() if logits._is_view() else logits
        logits[..., real:] = torch.finfo(logits.dtype).min
    return logits
