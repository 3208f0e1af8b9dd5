"""The loss by chunks of rows: that of whole logits, their gradients to the rounding of a sum, and less memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed._tools.mem_tracker import MemTracker

from lightning_llm.config.compose import compose_config
from lightning_llm.linalg.gemm import linear_with_unrounded_wgrad
from lightning_llm.model import flops as logit_chunks
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.linear import Linear
from lightning_llm.model.loss import LossReduction, next_token_loss_sum

B, T, D, V = 3, 37, 16, 64


@pytest.fixture(params=[V, 7 * V, 50 * V, 1 << 30], ids=["1 row", "7 rows", "50 rows", "whole"])
def limit(request, monkeypatch):
    monkeypatch.setitem(logit_chunks.WHOLE_LOGITS, "cpu", request.param)
    return request.param


def given(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, D, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(V, (B, T), generator=generator).masked_fill(
        torch.rand(B, T, generator=generator) < 0.2, -100
    )
    return x, labels


def gradients(head, x, labels, scale, said=1.0):
    """Return the loss and the gradients of its product with `scale`; the expected gradient is `said` times larger."""
    loss = head(x, LossReduction(labels, next_token_loss_sum, torch.tensor(scale * said)))
    head.weight.grad = x.grad = None
    (loss * scale).backward()
    return loss.detach(), x.grad, head.weight.grad


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_it_is_torchs_own_loss_and_gradients(dtype, bound, rounds, limit):
    """Against `cross_entropy` of all logits in float64, for right and wrong expected gradients."""
    torch.manual_seed(0)
    head = Linear(D, V, bias=False, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    head.rounds_wgrad = rounds or dtype == torch.float64
    x, labels = given(dtype)
    wide, weight = (each.detach().to(dtype).double().requires_grad_() for each in (x, head.weight))
    wanted = F.cross_entropy((wide @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    (wanted * 0.125).backward()
    for said in (1.0, 4.0):
        loss, grad_x, grad_weight = gradients(head, x, labels, 0.125, said)
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        assert grad_x.dtype == dtype
        assert grad_weight.dtype == head.weight.dtype
        for found, exact in ((loss, wanted), (grad_x, wide.grad), (grad_weight, weight.grad)):
            assert (found.double() - exact).norm() <= bound * exact.norm()


def test_whole_logits_are_the_same_bits(limit):
    """If there is one chunk; the rows of the loss's gradient by x in any case."""
    head = Linear(D, V, bias=False)
    x, labels = given(torch.bfloat16)
    loss, grad_x, grad_weight = gradients(head, x, labels, 0.25)
    x.grad = head.weight.grad = None
    whole = next_token_loss_sum(head(x), labels)
    (whole * 0.25).backward()
    assert torch.equal(grad_x, x.grad)
    if limit == 1 << 30:
        assert torch.equal(loss, whole)
        assert torch.equal(grad_weight, head.weight.grad)


def test_gradients_that_were_given_are_not_given_again_as_none(monkeypatch):
    monkeypatch.setitem(logit_chunks.WHOLE_LOGITS, "cpu", 5 * V)
    x, labels = given(torch.float32)
    loss = Linear(D, V, bias=False)(x, LossReduction(labels, next_token_loss_sum, torch.ones(())))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


def test_chunks_are_made_where_they_save_memory(monkeypatch):
    """Of about equally many rows, none of more logits than there may be; and not for few rows of many columns."""
    monkeypatch.setitem(logit_chunks.WHOLE_LOGITS, "cpu", 10 * V)
    for rows in (1, 63, 64, 65, 111, 640):
        at_once = logit_chunks.rows_at_once(rows, D, V, "cpu")
        assert at_once == rows if rows < 4 * D else at_once <= 10
        assert rows < 4 * D or -(-rows // at_once) == -(-rows // 10)
    assert logit_chunks.rows_at_once(8192, 4096, 128_256, "cuda") == 8192
    assert logit_chunks.rows_at_once(32_768, 2048, 128_256, "cuda") == 4096


def test_a_scaled_loss_loses_nothing_to_fp16(monkeypatch):
    """Gradients are multiplied by the loss scale before they are rounded: of 2^-26 of them fp16 has zeros."""
    monkeypatch.setitem(logit_chunks.WHOLE_LOGITS, "cpu", 5 * V)
    head = Linear(D, V, bias=False)
    x, labels = given(torch.float16)
    scale = 2.0**-30 * 2.0**16  # of many targets, and the loss scale
    _, grad_x, _ = gradients(head, x, labels, scale)
    assert (grad_x != 0).float().mean() > 0.7
    _, lost, _ = gradients(head, x, labels, scale, said=2.0**-12)
    assert (lost != 0).float().mean() < 0.3


def test_gradients_that_are_not_needed_are_not_computed(monkeypatch):
    monkeypatch.setitem(logit_chunks.WHOLE_LOGITS, "cpu", 5 * V)
    x, labels = given(torch.float32)
    head = Linear(D, V, bias=False)
    _, grad_x, grad_weight = gradients(head, x, labels, 1.0)
    head.weight.requires_grad_(False)
    assert torch.equal(gradients(head, x, labels, 1.0)[1], grad_x)
    head.weight.requires_grad_()
    x.requires_grad_(False)
    assert torch.equal(gradients(head, x, labels, 1.0)[2], grad_weight)
    with torch.no_grad():
        assert not head(x, LossReduction(labels, next_token_loss_sum, torch.ones(()))).requires_grad
    with pytest.raises(ValueError, match="a bias"):
        LossReduction(labels, next_token_loss_sum, torch.ones(()))(
            linear_with_unrounded_wgrad, x, head.weight, torch.ones(V)
        )


@pytest.mark.parametrize("words", [["model=gemma2_tiny"], ["model=llama_tiny", "model.vocab_size=1001"]])
def test_a_decoders_loss_is_that_of_its_logits(words, monkeypatch):
    """With capped logits, a tied embedding and padding ids: every operation between projection and loss."""
    config = compose_config([*words, "model.num_layers=2"])
    model = Decoder(config.model)
    initialise(model, 0)
    tokens = torch.randint(config.model.vocab_size, (4, 256), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    found = {}
    for limit in (1 << 30, 100 * config.model.padded_vocab_size):
        monkeypatch.setitem(logit_chunks.WHOLE_LOGITS, "cpu", limit)
        model.zero_grad()
        loss = model(tokens, loss=LossReduction(labels, next_token_loss_sum, torch.tensor(0.01)))
        (loss * 0.01).backward()
        found[limit] = torch.cat([loss.detach()[None], *(each.grad.flatten() for each in model.parameters())])
    whole, cut = found.values()
    assert not torch.equal(whole, cut)
    assert (whole - cut).norm() <= 1e-5 * whole.norm()
    logits = next_token_loss_sum(model(tokens), labels)
    assert torch.equal(logits, whole[0])


def test_memory_is_that_of_a_chunk(monkeypatch):
    """Of 2,048 rows over 8,192 ids: whole, logits and their gradient are 64 MB in bf16, a chunk of 256 rows has 8."""
    rows, width, ids = 2048, 64, 8192
    peaks = {}
    for limit in (1 << 30, 256 * ids):
        monkeypatch.setitem(logit_chunks.WHOLE_LOGITS, "cpu", limit)
        head = Linear(width, ids, bias=False)
        x = torch.randn(1, rows, width, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(1, rows, dtype=torch.int64)
        with MemTracker() as tracker:
            head(x, LossReduction(labels, next_token_loss_sum, torch.ones(()))).backward()
        peaks[limit] = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    logits = rows * ids * 2
    assert peaks[1 << 30] > 2 * logits
    assert peaks[256 * ids] < 0.75 * logits  # the weight, its gradients and sums among it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_output_z_loss_adds_its_gradient_and_not_its_value(limit, dtype):
    """Against autograd of `CE + z mean(logsumexp^2)`, in fp64, over whole logits."""
    x, labels = given(dtype)
    head = Linear(D, V, bias=False)
    z, scale = 0.1, torch.tensor(1 / labels.numel())
    loss = head(x, LossReduction(labels, lambda *given: next_token_loss_sum(*given, z_loss=z), scale))
    (loss * scale).backward()
    wide, weight = (each.detach().double().requires_grad_() for each in (x, head.weight))
    logits, kept = (wide @ weight.t()).flatten(0, 1), labels.flatten() != -100
    cross_entropy = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    objective = cross_entropy + z * (torch.logsumexp(logits, -1)[kept] ** 2).sum()
    (objective / labels.numel()).backward()
    exact = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 1e-3}
    torch.testing.assert_close(loss.double(), cross_entropy, rtol=exact["rtol"], atol=0.1)
    torch.testing.assert_close(x.grad.double(), wide.grad, **exact)
    torch.testing.assert_close(head.weight.grad.double(), weight.grad, **exact)
