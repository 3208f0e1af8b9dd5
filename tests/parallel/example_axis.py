"""An example of a mesh axis as an installed package adds one: its ranks hold the same and compute the same."""

from typing import ClassVar

from lightning_llm.plan.axes.axis import AXES, MeshAxis


class SpareAxis(MeshAxis):
    """Axis of ranks that repeat the work of the first one."""

    name: ClassVar[str] = "spare"
    description: ClassVar[str] = "ranks that repeat what others do"


AXES.register(SpareAxis(), outside="dp_shard")
