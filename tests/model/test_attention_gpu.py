"""On a GPU: which of torch's kernels attention takes. One that keeps all scores is a silent loss of memory and time."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_llm.model.attention.attention import torch_attention
from lightning_llm.model.attention.kernel_choice import document_mask

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_no_kernel_keeps_all_scores(kv_heads, masked):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    q, k, v = (
        torch.randn(2, 256, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, kv_heads, kv_heads)
    )
    mask = document_mask((torch.arange(256, device="cuda") // 100).expand(2, -1)) if masked else None
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch_attention(q, k, v, mask).float().sum().backward()
    kernels = {event.key for event in recorded.key_averages() if "dot_product" in event.key}
    assert not any("math" in kernel for kernel in kernels), kernels
    wanted = ("efficient", "cudnn") if masked else ("_attention_backward",)  # cuDNN's, too, keeps no scores
    assert any(part in kernel for part in wanted for kernel in kernels), kernels
