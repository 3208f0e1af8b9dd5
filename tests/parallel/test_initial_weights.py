"""Weights from a folder under every kind of layout: the files' bits on every rank, and no more memory than a shard.

15 seconds.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lightning_llm.config.compose import compose_config
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.interop.families import architecture, stored_as
from lightning_llm.model.weights.folder import open_huggingface
from lightning_llm.model.weights.load import InitialWeights, state_dict_of
from lightning_llm.parallel.apply import ELEMENTS_AT_ONCE, apply_parallel
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.resolve import plan_of
from tests.model.huggingface_states import huggingface_config
from tests.parallel.layout_matrix import Case
from tests.parallel.traced_run import layout_here, of_all_stages, whole
from tests.weight_folders import random_weights, write_huggingface

FULL = pytest.mark.full
PIECES = {token: [token % 7, 3, token % 50] for token in range(300, 310)}
LAYOUTS = [
    ("zero3", 2, False), ("tp", 2, True), ("hsdp", 4, True), ("pp_tp", 4, False),
    pytest.param("pp", 2, True, marks=FULL), pytest.param("cp", 2, False, marks=FULL),
    pytest.param("zero2", 2, True, marks=FULL), pytest.param("fsdp_cp_tp", 8, False, marks=FULL),
]  # fmt: skip
SHAPE = ["model.num_heads=4", "model.num_kv_heads=2", "model.num_layers=4", "model.vocab_size=310"]


def loaded(config: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Every parameter whole, as the ranks hold it before the first step."""
    layout = layout_here(config.parallel)
    with torch.device("meta"):
        model = Decoder(config.model)
    initial = InitialWeights(open_huggingface(folder), config.model, PIECES)
    length = config.data.sequence_length
    apply_parallel(model, layout, config.precision, 1, length, torch.device("cpu"), initial)
    return of_all_stages({name: whole(each) for name, each in model.named_parameters()}, layout)


@pytest.mark.parametrize(("layout", "world", "tied"), LAYOUTS)
def test_every_rank_holds_the_files_bits_and_new_tokens_the_mean_of_their_pieces(
    layout, world, tied, ranks, small_run, tmp_path
):
    place = [f"parallel={layout}", f"trainer.devices={world}", f"model.tie_embeddings={str(tied).lower()}"]
    config = compose_config(small_run(tmp_path, *SHAPE, *place))
    smaller = config.model.model_copy(update={"vocab_size": 300})
    folder = write_huggingface(tmp_path / "hf", smaller, shards=2, dtype=torch.bfloat16)
    found = ranks(world).call(loaded, config, folder)
    expected = {name: tensor.to(torch.bfloat16).float() for name, tensor in random_weights(smaller).items()}
    for name, tensor in expected.items():
        if name in ("embedding.weight", "head.weight"):
            means = torch.stack([tensor[pieces].mean(0) for pieces in PIECES.values()])
            padding = torch.zeros(config.model.padded_vocab_size - 310, tensor.shape[1])
            tensor = torch.cat([tensor[:300], means, padding])
        assert torch.equal(found[name], tensor), name
    assert found.keys() == expected.keys()


@FULL
def test_an_fp8_run_from_weights_trains_to_the_bits_of_one_rank(to_the_bits, matrix_run, tmp_path):
    shape = matrix_run("single", 1, 4, "fp8_delayed", "model.num_layers=4").model
    folder = write_huggingface(tmp_path / "hf", shape)
    tokenizer = [
        "data.tokenizer.kind=file",
        f"data.tokenizer.path={folder}/tokenizer.json",
        "data.tokenizer.vocab_size=null",
    ]
    words = ["model.num_layers=4", f"model.init_from={folder}", *tokenizer]
    to_the_bits(Case("zero3", 2, 4, "fp8_delayed"), *words)


def peak(config: Any, folder: Path) -> tuple[int, int]:
    """Return by how many bytes this process grew at most while it read its part, and the bytes of its parameters."""
    layout = layout_here(config.parallel)
    with torch.device("meta"):
        model = Decoder(config.model)
    initial = InitialWeights(open_huggingface(folder), config.model)
    initial("norm.weight", 0, config.model.hidden_size)  # imports everything that the first use needs
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _status("VmRSS")
    apply_parallel(model, layout, config.precision, 1, config.data.sequence_length, torch.device("cpu"), initial)
    grown = _status("VmHWM") - before
    return grown, sum(getattr(each, "_local_tensor", each).nbytes for each in model.parameters())


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


@pytest.mark.parametrize(("layout", "world"), [("zero3", 4), pytest.param("tp", 2, marks=FULL)])
def test_no_rank_holds_more_than_its_shard_and_one_slice(layout, world, ranks, small_run, tmp_path):
    """200 MB of weights on four ranks: 50 MB each by plan; a rank that read all of it would hold four times that."""
    sizes = ["model.num_layers=12", "model.hidden_size=512", "model.num_heads=4", "model.num_kv_heads=4"]
    place = [f"parallel={layout}", f"trainer.devices={world}", "model.ffn_hidden_size=2048"]
    config = compose_config(small_run(tmp_path, *sizes, *place, "data.global_batch_size=8"))
    folder = tmp_path / "hf"
    folder.mkdir()
    stored = stored_as(config.model, architecture(config.model)).values()
    save_file({each.name: torch.ones(each.whole) for each in stored}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(huggingface_config(config.model)))
    grown, held = ranks(world).call(peak, config, folder)
    planned = memory_bytes(plan_of(config))["parameters"]
    one_tensor = 4 * max(each.whole[0] * each.whole[-1] for each in stored if len(each.whole) > 1)
    one_slice = 4 * min(ELEMENTS_AT_ONCE, one_tensor // 4)
    assert held <= planned <= sum(tensor.nbytes for tensor in state_dict_of(open_huggingface(folder)).values()) / 1.9
    assert grown <= 1.05 * planned + one_tensor + one_slice  # one_tensor: the file's pages, mapped while it is read
