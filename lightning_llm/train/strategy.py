"""The strategy owns the step: one Lightning batch is one optimizer step of micro-batches, whatever the layout."""

from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightning_llm.data.corpus import Batch
from lightning_llm.train.checkpoint import restore
from lightning_llm.train.nonfinite import NonFiniteError
from lightning_llm.train.progress import set_completed_steps


class SingleRankStrategy(SingleDeviceStrategy):
    """One rank holds everything.

    Lightning's loop calls training_step, zero_grad and backward in that order. Forward and backward of all
    micro-batches happen in `training_step` (as a pipeline schedule needs it), so `backward` only fires the hooks around
    it and the module's zero_grad does nothing.
    """

    def __init__(self, device: torch.device, resume_from: Any = None):
        """`resume_from`: the `Checkpoint` that the run continues from, or None."""
        super().__init__(device=device)
        self.resume_from = resume_from

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if self.resume_from is not None:
            module = self.lightning_module
            module.completed_steps = restore(self.resume_from, module, self.optimizers[0], self.precision_plugin)
            set_completed_steps(trainer, module.completed_steps)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Run forward and backward of every micro-batch; return the mean loss over the step's target tokens, fp32."""
        module, optimizer = self.lightning_module, self.optimizers[0]
        learning_rate = module.learning_rate()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.zero_grad(set_to_none=True)
        module.quantisation.begin_step(module.model, module.completed_steps)
        loss = self._accumulate(batch)
        if not torch.isfinite(loss) and not self.precision_plugin.can_back_off:
            raise NonFiniteError("loss", loss.item(), module.completed_steps + 1)
        module.open_step_record(loss.item(), learning_rate)
        return {"loss": loss}

    def _accumulate(self, batch: Batch) -> Tensor:
        module = self.lightning_module
        targets = (batch.labels != -100).sum().clamp(min=1)  # over the whole step, so uneven micro-batches weigh right
        losses = []
        for index in range(batch.tokens.shape[0]):
            module.quantisation.begin_micro_batch(module.model, module.completed_steps, index)
            documents = batch.document_ids[index] if batch.document_ids is not None else None
            loss = module.training_step(batch.tokens[index], batch.labels[index], documents) / targets
            (loss * self.precision_plugin.loss_scale).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Take the step through the precision plugin, then set the delayed scales of the next one."""
        module = self.lightning_module
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        module.quantisation.end_step(module.model)
        module.completed_steps += 1
        return result

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Fire the hooks around backward, which has run already."""
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss
