"""A token mixer: config class without torch, which the planner imports."""

from typing import ClassVar, Literal

from pydantic import Field

from lightning_llm.config.schema.model import MIXERS
from lightning_llm.model.spec import LinearSpec, Mixer, SavedTensor, hidden


@MIXERS.register
class Average(Mixer):
    """An exponential moving average of values, gated."""

    module: ClassVar[str] = "average_module:AverageModule"  # called with (this kind, model)
    kind: Literal["average"] = "average"
    recurrent: ClassVar[bool] = True  # forward gets document ids instead of rope and mask
    decay: float = Field(0.9, gt=0, lt=1)

    def linears(self, model):  # in module order; tensor parallelism splits "column" and "row"
        size = hidden(model)
        return [
            LinearSpec("v_proj", "column", size, size, bias=False),
            LinearSpec("g_proj", "column", size, size, bias=False),
            LinearSpec("o_proj", "row", size, size, bias=False, depth_scaled=("gpt2", "llama")),
        ]

    def flops_per_token(self, model, sequence_length):  # without the linears: one product forward, one backward
        return 4 * sequence_length * model.hidden_size

    def saved_tensors(self, model, forward):  # elements per token saved for backward, and bytes each
        size, width = model.hidden_size, forward.width
        return [
            SavedTensor("input", size, width, "gathered", linears=("v_proj", "g_proj")),
            SavedTensor("weights", forward.sequence_length, width, "gathered", per_position=not forward.documents),
            SavedTensor("values, gate before and after, average", 4 * size, width),
            SavedTensor("o_proj's input", size, width, linears=("o_proj",)),
        ]

    def divisions(self, model):  # sizes that tensor parallelism must divide
        return {"model.hidden_size": (model.hidden_size, "each rank takes some features")}
