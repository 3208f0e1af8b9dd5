"""`model.blocks`: what each block is made of, chosen by name among the registered kinds."""

from typing import Annotated

from pydantic import Field

from lightning_llm.base.registry import Registry
from lightning_llm.config.schema.base import Group

MIXERS: Registry[Group] = Registry(
    "mixer", "lightning_llm.model.attention.kinds", "lightning_llm.model.recurrent.kinds"
)
FEED_FORWARDS: Registry[Group] = Registry("feed-forward network", "lightning_llm.model.kinds")
NORMS: Registry[Group] = Registry("norm", "lightning_llm.model.kinds")
"""Their kinds are the classes of `model.spec`: `Mixer`, `FeedForward`, `Norm`."""


class BlockConfig(Group):
    """One kind of block. Null: the mixer that the block is called after, the feed-forward of model.activation."""

    mixer: Annotated[Group, MIXERS] | None = Field(None, description="kind: a registered mixer, and its own keys")
    feed_forward: Annotated[Group, FEED_FORWARDS] | None = Field(
        None, description="kind: a registered feed-forward network, and its own keys"
    )
    post_norms: bool = Field(False, description="a norm behind mixer and feed-forward, too, before each is added")
