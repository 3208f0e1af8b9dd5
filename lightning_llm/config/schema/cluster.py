"""`cluster`: the machines that `plan` times a step on. Figures are per device; each file says where they come from.

What between them cannot be is refused by `plan.cluster`.
"""

from typing import Annotated, Literal

from pydantic import Field

from lightning_llm.config.schema.base import Group, ThreadCount
from lightning_llm.config.schema.run import Hardware

Bandwidth = Annotated[float, Field(ge=1e-3, le=1e6)]
"""GB/s: from a megabyte to a petabyte per second."""
Tflops = Annotated[float, Field(ge=1e-4, le=1e5)]
"""10^12 FLOP/s: from what one thread emulates to more than any device has; `plan.cluster` asks the data sheet."""
Microseconds = Annotated[float, Field(ge=0, le=1e6)]


class LinkConfig(Group):
    """What joins a device to others: in one direction, with all its links together."""

    gb_per_second: Bandwidth = Field(description="10^9 bytes per second that a device sends")
    latency_microseconds: Microseconds = Field(description="what one hop of a collective takes, however few its bytes")


class ClusterConfig(Group):
    """Machines of equal devices, and what joins these within a machine and between machines."""

    name: str = Field(description="the file it was composed from, or your own name")
    hardware: Hardware = Field(description="the device: whose peaks and memory `plan` takes, as hardware= does")
    devices_per_node: ThreadCount = Field(description="devices, and so ranks, of a machine")
    memory_gb_per_second: Bandwidth = Field(description="10^9 bytes per second that a device reads or writes")
    within_node: LinkConfig = Field(description="between devices of a machine")
    between_nodes: LinkConfig = Field(description="between machines, a device's share")
    devices_per_package: ThreadCount = Field(1, description="devices that share a package, closer than others")
    within_package: LinkConfig | None = Field(None, description="between those; null: as within the machine")
    start_microseconds: Microseconds = Field(description="what a collective takes before its first hop")
    operator_microseconds: Microseconds = Field(
        0.0, description="what an operator takes beside its bytes and FLOPs; 0 where a queue of kernels hides it"
    )
    overlap: bool = Field(True, description="whether collectives run beside computation, where the code lets them")
    peak_tflops: dict[Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4"], Tflops] | None = Field(
        None, description="measured GEMM speed by format, 10^12 FLOP/s; null: the data sheet's of `hardware`"
    )
