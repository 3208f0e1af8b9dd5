"""Distillation: the loss against float64, the step against torch, bits over resumes, rejected configs and records."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from lightning_llm.__main__ import main
from lightning_llm.config.from_file import load_config
from lightning_llm.config.schema.run import DistilConfig
from lightning_llm.data.opening import open_corpus
from lightning_llm.evaluate.weights import load_model
from lightning_llm.model.attention.kernel_choice import SeenKeys, attention_by, mask_of
from lightning_llm.model.loss import divergence_sum
from lightning_llm.train.distillation import Distillation
from tests.run_metrics import read_metrics


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


TAUGHT = "distil.weight=0.75", "distil.temperature=2", "schedule.total_steps=6"


def named(folders) -> str:
    return f"distil.teachers=[{','.join(map(str, folders))}]"


@pytest.fixture(scope="module")
def student(small_run, teachers, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    assert main(["train", *small_run(folder, named(teachers), *TAUGHT)]) == 0
    return folder / "run"


def test_first_step_is_that_of_float64_on_logits(teachers, small_run, tmp_path):
    """Recorded loss, divergence and gradient norm against torch's own losses in float64 over saved models' logits."""
    still = "optim.learning_rate=1e-30", "schedule.warmup_steps=0", "optim.weight_decay=0.0", "trainer.max_steps=1"
    words = small_run(tmp_path, named(teachers), "distil.weight=0.75", "distil.temperature=2", *still)
    assert main(["train", *words]) == 0
    models = [load_model(folder, "fp32", "cpu")[0] for folder in (tmp_path / "run", *teachers)]
    student = models[0].requires_grad_()
    config = load_config(tmp_path / "run" / "config.yaml", [])
    batch = open_corpus(config.data, config.seed, config.model.vocab_size, 1).micro_batches(0)
    tokens, labels = batch.tokens.flatten(0, 1), batch.labels.flatten()
    logits, *theirs = (model(tokens)[..., :320].double().flatten(0, 1) for model in models)
    ensemble = torch.stack([each.softmax(-1) for each in theirs]).mean(0).log()
    cross_entropy = F.cross_entropy(logits, labels)
    log_p, log_q = ((each / 2).log_softmax(-1) for each in (ensemble, logits))
    divergence = 4 * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    (0.25 * cross_entropy + 0.75 * divergence).backward()
    norm = sum(each.grad.double().square().sum() for each in student.parameters()).sqrt()
    record = read_metrics(tmp_path / "run")[0]
    assert record["loss"] == pytest.approx(cross_entropy.item(), rel=1e-6)
    assert record["distil_kl"] == pytest.approx(divergence.item(), rel=1e-5)
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.full
def test_teachers_of_one_folder_alone_are_their_ensemble(teachers, small_run, tmp_path):
    """The mean of a model with itself is that model; and it is not that of the other."""
    found = []
    for number, named_twice in enumerate(([teachers[0]], [teachers[0]] * 2, [teachers[1]])):
        words = small_run(tmp_path, named(named_twice), f"run.dir={tmp_path / str(number)}", "trainer.max_steps=2")
        assert main(["train", *words, "distil.combine=logits"]) == 0
        found.append([each["distil_kl"] for each in read_metrics(tmp_path / str(number)) if "loss" in each])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0] != pytest.approx(found[2], rel=1e-3)


def test_invalid_teachers_are_rejected(teachers, student, small_run, tmp_path, capsys):
    def told(*words, folder=tmp_path) -> str:
        assert main(["train", *small_run(folder, *words)]) == 2
        return capsys.readouterr().err

    text = told(named(teachers), "parallel=tp", "trainer.devices=2", "model.num_kv_heads=2")
    assert "parallel.tp: is 2, and each rank runs whole teachers (distil)" in text
    assert "parallel.pp: is 2" in told(named(teachers), "parallel=pp", "trainer.devices=2")
    text = told(named([*teachers, tmp_path / "nothing"]), "model.vocab_size=336")
    assert "predicts 320 tokens, and model.vocab_size is 336" in text
    assert f"distil.teachers: {tmp_path / 'nothing'} does not exist" in text
    assert "has a different tokenizer than the run" in told(named(teachers), "data.tokenizer.vocab_size=290")
    shutil.copytree(student, tmp_path / "copy")
    changed = json.loads((tmp_path / "copy" / "summary.json").read_text())
    changed["distil"][1]["digest"] = "0" * 32
    (tmp_path / "copy" / "summary.json").write_text(json.dumps(changed))
    words = named(teachers), *TAUGHT, f"run.dir={tmp_path / 'copy'}"
    assert "weights changed since" in told(*words, "trainer.max_steps=8", "resume=auto")


def test_the_plan_counts_teachers(teachers, small_run, tmp_path, capsys):
    """Bytes of the teachers against the tensors themselves, and the peak against a step that is counted."""
    words = small_run(
        tmp_path, named(teachers), "precision=bf16", "data.sequence_length=64", "model.max_sequence_length=64"
    )
    assert main(["plan", *words, "--json", "--dry-run"]) == 0
    facts = json.loads(capsys.readouterr().out)
    decoders = [load_model(folder, "bf16", "cpu")[0] for folder in teachers]
    held = sum(parameter.nbytes for decoder in decoders for parameter in decoder.parameters())
    assert facts["memory_bytes"]["teachers"] == held
    assert facts["teacher_flops_per_token"] == 2 * (facts["flops_per_token"] // 3)
    assert facts["dry_run"]["memory_bytes"]["total"] == pytest.approx(facts["memory_bytes"]["total"], rel=0.1)


def test_resume_has_the_bits(student, teachers, small_run, tmp_path):
    words = small_run(tmp_path, named(teachers), *TAUGHT)
    assert main(["train", *words, "trainer.max_steps=4"]) == 0
    moved = [shutil.copytree(each, tmp_path / f"moved{i}") for i, each in enumerate(teachers)]
    assert main(["train", *words, "resume=auto", named(moved[::-1])]) == 2  # in this order they are others
    assert main(["train", *words, "resume=auto", named(moved)]) == 0
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


def test_teachers_take_no_masks_by_blocks():
    """Masks by blocks are only for compiled blocks, such as the student's."""
    seen = []

    class Teacher(nn.Module):
        def forward(self, tokens, positions, documents):
            seen.append(type(mask_of(keys, True)))
            return torch.zeros(1, 4, 8)

    places, documents = torch.arange(4), torch.zeros(1, 4, dtype=torch.long)
    keys = SeenKeys.from_positions(places, places, documents, None)
    distillation = Distillation(DistilConfig(teachers=("/x",)), Teacher(), 8)
    with attention_by("auto", by_blocks=True):
        distillation.targets(documents, documents)
        seen.append(type(mask_of(keys, True)))
    assert seen[0] is torch.Tensor
    assert seen[1] is BlockMask
