"""`distil`: learning from what models that are there predict, in place of the next tokens or beside them."""

from typing import Annotated, Literal

from pydantic import Field

from lightning_llm.config.schema.base import Fraction, Group, PositiveFloat


class DistilConfig(Group):
    """Knowledge distillation (Hinton et al. 2015, arXiv 1503.02531) from one teacher, or from an ensemble of them.

    The loss of a token is `(1 - weight) CE(label) + weight temperature^2 KL(teachers || student)`, both distributions
    at the temperature. `loss` and `val_loss` stay the cross entropy of the labels; the divergence is `distil_kl`.
    """

    teachers: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = Field(
        description="runs, checkpoints, imported or Hugging Face folders of the student's vocabulary"
    )
    weight: Fraction = Field(1.0, description="share of the teachers in the loss; the rest is the next tokens'")
    temperature: PositiveFloat = Field(1.0, description="divides the logits of both in the divergence")
    combine: Literal["probabilities", "logits"] = Field(
        "probabilities", description="what the mean is taken of, where there are several teachers"
    )
