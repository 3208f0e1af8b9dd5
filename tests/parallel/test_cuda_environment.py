"""Environment variables of CUDA and NCCL are set unless the user has, and reported with who set them. 0.1 s."""

import os
from types import SimpleNamespace

import pytest

from lightning_llm.config.compose import compose_config
from lightning_llm.parallel import cuda_environment
from lightning_llm.parallel.cuda_environment import AGENT, ALLOCATOR, GLOO, NCCL, environment_line, set_missing, wanted
from lightning_llm.plan.resolve import DerivedConfig
from lightning_llm.precision.native.decide import DEVICES


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """An environment without any of them."""
    kept = {name: value for name, value in os.environ.items() if not cuda_environment.SHOWN.fullmatch(name)}
    monkeypatch.setattr(os, "environ", {name: value for name, value in kept.items() if name != cuda_environment.OURS})
    return os.environ


def of(*words, device="sm_90"):
    return wanted(DerivedConfig(compose_config(list(words)), DEVICES[device]).plan())


def test_variables_set_for_ranks():
    assert of(device="cpu") == {}
    assert of("parallel=zero3", "trainer.devices=4", device="cpu") == {"TORCH_FR_BUFFER_SIZE": "128"}
    assert of() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert of("parallel=zero3", "trainer.devices=4") == {**ALLOCATOR, **NCCL}
    both = of("parallel=fsdp_tp", "trainer.devices=4")
    assert both == {**ALLOCATOR, **NCCL, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in of("parallel=tp", "trainer.devices=2")


def test_user_values_are_kept_and_all_are_reported(environment):
    environment |= {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    environment["NCCL_DEBUG"] = "WARN"
    set_missing({**ALLOCATOR, **NCCL})
    assert "PYTORCH_ALLOC_CONF" not in environment
    assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert environment_line("cuda") == (
        "env    NCCL_DEBUG=WARN (yours), PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 (yours), "
        "TORCH_FR_BUFFER_SIZE=2000 (lightning-llm), TORCH_NCCL_ASYNC_ERROR_HANDLING=3 (lightning-llm), "
        "TORCH_NCCL_DUMP_ON_TIMEOUT=0 (yours)"
    )
    assert environment_line("cpu") == "env    TORCH_FR_BUFFER_SIZE=2000 (lightning-llm)"


def test_ranks_on_cpus_keep_gloos_collectives(environment):
    assert environment_line("cpu") is None
    set_missing(GLOO)
    assert environment_line("cpu") == "env    TORCH_FR_BUFFER_SIZE=128 (lightning-llm)"
    environment["TORCH_FR_BUFFER_SIZE"] = "0"
    set_missing(GLOO)
    assert environment_line("cpu") == "env    TORCH_FR_BUFFER_SIZE=0 (yours)"


def test_a_rank_knows_what_its_launcher_set(environment):
    set_missing(ALLOCATOR)
    set_missing(ALLOCATOR)  # a rank, which inherits both
    assert environment_line("cuda") == "env    PYTORCH_ALLOC_CONF=expandable_segments:True (lightning-llm)"
    environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
    assert environment_line("cuda") == "env    PYTORCH_ALLOC_CONF=expandable_segments:False (yours)"


@pytest.mark.parametrize(("agent", "given", "found"), [(True, "1", "3"), (False, "1", "1"), (True, "0", "0")])
def test_the_value_of_torchs_agent_is_not_the_users(agent, given, found, environment):
    """torchrun gives its ranks 1 where the user has set nothing, and with it no flight record is written."""
    environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = given
    if agent:
        environment[AGENT] = "some-run"
    set_missing(NCCL)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == found


def test_settings_are_not_reported_for_an_allocator_already_in_use(environment, monkeypatch):
    used = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(cuda_environment.sys.modules, "torch", used)
    set_missing({**ALLOCATOR, **NCCL})
    assert "PYTORCH_ALLOC_CONF" not in environment
    assert environment_line("cuda").startswith("env    TORCH_FR_BUFFER_SIZE=2000")
