from typing import ClassVar

from lightning_llm.plan.axes.axis import AXES, MeshAxis


class SpareAxis(MeshAxis):
    """Divides nothing: its ranks repeat what others do."""

    name: ClassVar[str] = "spare"
    description: ClassVar[str] = "ranks that repeat what others do"


AXES.register(SpareAxis(), outside="dp_shard")  # between dp_replicate and dp_shard, in the order of ranks
