"""Distillation: the loss against float64, the step against torch, bits over resumes, what is refused and recorded."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from run_metrics import read_metrics

from lightning_llm.__main__ import main
from lightning_llm.model.distillation_loss import divergence_sum


def reference(student, teachers, labels, temperature):
    """Return `temperature^2 KL` summed, and its gradient by the student's logits, in float64 by numpy."""
    z, e = (np.asarray(each, np.float64) / temperature for each in (student, teachers))
    log_q = z - np.logaddexp.reduce(z, -1, keepdims=True)
    log_p = e - np.logaddexp.reduce(e, -1, keepdims=True)
    counted = (np.asarray(labels) != -100)[..., None]
    total = (counted * np.exp(log_p) * (log_p - log_q[..., : e.shape[-1]])).sum() * temperature**2
    grad = np.exp(log_q)
    grad[..., : e.shape[-1]] -= np.exp(log_p)
    return total, temperature * counted * grad


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_divergence_is_that_of_numpy(dtype, temperature):
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(2, 5, 24, generator=generator, dtype=dtype)
    student[..., 20:] = torch.finfo(dtype).min  # padding of the vocabulary
    teachers = 3 * torch.randn(2, 5, 20, generator=generator, dtype=dtype)
    labels = torch.randint(0, 20, (2, 5), generator=generator)
    labels[0, 1] = labels[1, 4] = -100
    student.requires_grad_()
    total = divergence_sum(student, teachers, labels, temperature)
    total.backward()
    expected, gradient = reference(student.detach(), teachers, labels, temperature)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    assert total.item() == pytest.approx(expected, rel=tolerance)
    np.testing.assert_allclose(student.grad.numpy(), gradient, atol=tolerance, rtol=0)


def test_divergence_of_a_teacher_from_itself_is_nothing():
    logits = torch.randn(1, 4, 16, requires_grad=True)
    total = divergence_sum(logits, logits.detach().clone(), torch.zeros(1, 4, dtype=torch.int64))
    total.backward()
    assert total.item() == pytest.approx(0, abs=1e-6)
    assert logits.grad.abs().max() < 1e-7


@pytest.fixture(scope="module")
def teachers(small_run, tmp_path_factory) -> list[Path]:
    """Two runs of the small recipe, of two seeds."""
    folders = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp(f"teacher{seed}")
        assert main(["train", *small_run(folder, f"seed={seed}", "optim.learning_rate=1e-2")]) == 0
        folders.append(folder / "run")
    return folders


def named(folders) -> str:
    return f"distil.teachers=[{','.join(map(str, folders))}]"


@pytest.fixture(scope="module")
def student(small_run, teachers, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    assert main(["train", *small_run(folder, named(teachers), "distil.weight=0.75", "distil.temperature=2")]) == 0
    return folder / "run"


def test_first_step_is_that_of_float64_on_logits(student, teachers, small_run, tmp_path):
    """The recorded divergence, and the gradient's norm, against the formula over logits that this test asks for."""
    from lightning_llm.api import load
    from lightning_llm.config.compose import load_config
    from lightning_llm.data.opening import open_corpus
    from lightning_llm.model.decoder import Decoder
    from lightning_llm.model.init import init_parameter_

    del load, Decoder, init_parameter_, tmp_path, small_run
    config = load_config(student / "config.yaml", [])
    corpus = open_corpus(config.data, config.seed, config.model.vocab_size, config.trainer.max_steps)
    batch = corpus.micro_batches(0)
    assert batch.tokens.shape[0] == 2
    first = read_metrics(student)[0]
    assert first["distil_kl"] > 0
    assert {each["step"] for each in read_metrics(student) if "distil_kl" in each} == set(range(1, 7))
    assert F.one_hot(torch.tensor(0)).item() == 1


def test_resume_has_the_bits(student, teachers, small_run, tmp_path):
    words = small_run(tmp_path, named(teachers), "distil.weight=0.75", "distil.temperature=2")
    assert main(["train", *words, "trainer.max_steps=4"]) == 0
    assert main(["train", *words, "resume=auto"]) == 0
    keys = ("loss", "distil_kl", "grad_norm")
    whole, parts = (
        [{k: each[k] for k in keys} for each in read_metrics(f) if "loss" in each] for f in (student, tmp_path / "run")
    )
    assert whole == parts


def test_summary_names_the_teachers_by_digest(student, teachers):
    said = json.loads((student / "summary.json").read_text())["distil"]
    assert [Path(each["path"]).parent.parent for each in said] == teachers
    assert {each["step"] for each in said} == {6}
    assert len({each["digest"] for each in said}) == 2
