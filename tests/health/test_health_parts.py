"""Parts of the check on one rank: products, memory, disk, thresholds, and the ranks blamed for wrong numbers."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_llm.base.errors import ConfigError
from lightning_llm.cli.health import NAMES, Threshold, config_problems, device_problems, read_thresholds
from lightning_llm.health import devices
from lightning_llm.health import devices as disk
from lightning_llm.health.check import blamed_pairs, blamed_ranks, check_health
from lightning_llm.health.communication import BUS_FACTORS, CollectiveTime, WrongValues, pairings
from lightning_llm.health.devices import FORMATS, Extent, SquareProduct
from lightning_llm.health.ranks import Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("number_format", FORMATS)
def test_products_are_right_in_every_format_and_a_wrong_bit_is_seen(number_format, monkeypatch):
    product = SquareProduct(number_format, 64, CPU)
    assert product.wrong_elements() == 0
    whole = product.a.long() @ product.b.long()
    assert torch.equal(product.run().long(), whole)  # below 256, exact even in bf16
    run = product.run

    def flipped():
        found = run()
        found[3, 5] += 1
        return found

    monkeypatch.setattr(product, "run", flipped)
    assert product.wrong_elements() == 1


def test_memory_that_forgets_a_bit_is_seen(monkeypatch):
    assert devices.wrong_words(1 << 16, CPU) == 0
    written = devices._written
    calls = []

    def forgets(chunk, number, bits):
        calls.append(number)
        found = written(chunk, number, bits)
        if len(calls) == 1:  # written, and not yet read
            chunk[77] ^= 1 << 40
        return found

    monkeypatch.setattr(devices, "_written", forgets)
    assert devices.wrong_words(1 << 16, CPU) == 1


def test_the_disk_is_measured_where_runs_will_go_and_nothing_stays(tmp_path, monkeypatch):
    found = disk.measure_disk(tmp_path / "runs" / "mine", 8 << 20)
    assert (found.folder, found.written_bytes, found.wrong) == (str(tmp_path), 8 << 20, False)
    assert found.write_gb_per_second > 0 < found.read_gb_per_second
    assert found.fsyncs_per_second == pytest.approx(1 / found.fsync_seconds)
    assert list(tmp_path.iterdir()) == []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *asked: b"\1" + pread(*asked)[1:])
    assert disk.measure_disk(tmp_path, 4 << 20).wrong


def test_a_full_disk_is_a_finding(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    extent = Extent((), 0.0, 16, 1 << 10, 1 << 10, disk_bytes=1 << 22)
    report = check_health(Ranks(0, 1, 30.0), CPU, extent, tmp_path)
    assert report.disks == {}
    (wrong,) = report.wrong
    assert f"{tmp_path} cannot be written: No space left on device" in wrong


def test_bus_bandwidths_are_those_of_nccl_tests():
    """https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: 2(n-1)/n, and (n-1)/n."""
    of_4 = {name: CollectiveTime(name, 4_000_000, 4, 0.001, 3).bus_gb_per_second for name in BUS_FACTORS}
    assert of_4 == pytest.approx({"all_reduce": 6.0, "all_gather": 3.0, "reduce_scatter": 3.0, "all_to_all": 3.0})


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
def test_each_pair_meets_once_and_no_rank_is_in_two_at_a_time(world):
    found = list(pairings(world))
    for pairs in found:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)
    every = [pair for pairs in found for pair in pairs]
    assert sorted(every) == [(a, b) for a in range(world) for b in range(a + 1, world)]


def blamed(world: int, faulty: set[int], least: int = 1) -> tuple[list[int], list[int]]:
    """Return the blamed ranks if a sum of at least `least` ranks is wrong because of a contribution of `faulty`."""

    def are_right(groups):
        ranks = [rank for group in groups for rank in group]
        assert len(set(ranks)) == len(ranks)
        assert min(map(len, groups)) > 1
        return [not faulty & set(members) or len(members) < least for members in groups]

    return blamed_ranks(world, are_right)


@pytest.mark.parametrize("world", [3, 4, 5, 8, 13])
def test_a_rank_with_a_wrong_contribution_to_a_sum_is_named(world):
    for rank in range(world):
        assert blamed(world, {rank}) == ([rank], [])
    assert blamed(8, {1, 6}) == ([1, 6], [])


def test_of_two_ranks_none_can_be_named_and_none_where_smaller_sums_are_right():
    assert blamed(2, {1}) == ([], [0, 1])
    assert blamed(4, {2}, least=4) == ([], [])
    assert blamed(4, set()) == ([], [])


def test_blame_falls_on_who_sends_receives_or_on_a_pair():
    hosts = ["a", "a", "b", "b"]

    def wrong(*pairs):
        return [WrongValues(receiver, 1, 0, 1.0, 2.0, (source,)) for source, receiver in pairs]

    assert blamed_pairs(wrong((1, 0), (1, 2), (1, 3)), hosts) == "wrong: data sent by rank 1 (a)"
    assert blamed_pairs(wrong((0, 2), (1, 2), (3, 2)), hosts) == "wrong: data received by rank 2 (b)"
    assert blamed_pairs(wrong((3, 0)), hosts) == "wrong: data sent from rank 3 (b) to rank 0 (a)"
    assert blamed_pairs(wrong((0, 1)), hosts[:2]) == "wrong: data sent from rank 0 (a) to rank 1 (a)"


def test_thresholds_are_read_and_all_problems_reported(tmp_path: Path):
    file = tmp_path / "least.yaml"
    file.write_text("gemm:\n  bf16.tflops: 60%\nall_reduce.bus_gb_per_second: 300\n")
    assert read_thresholds(file) == [
        Threshold("gemm.bf16.tflops", 0.6, is_share=True),
        Threshold("all_reduce.bus_gb_per_second", 300.0, is_share=False),
    ]
    file.write_text("gem.bf16.tflops: 1\ndisk.free_bytes: -1\np2p.gb_per_second: 120%\nmemory.gb_per_second: true\n")
    with pytest.raises(ConfigError) as refused:
        read_thresholds(file)
    said = str(refused.value)
    assert len(refused.value.problems) == 4
    assert "there is no figure 'gem.bf16.tflops'. Did you mean 'gemm.bf16.tflops'?" in said
    for name in ("disk.free_bytes is -1", "p2p.gb_per_second is '120%'", "memory.gb_per_second is True"):
        assert name in said


def test_thresholds_that_cannot_be_checked_are_rejected():
    shares = [Threshold(name, 0.5, is_share=True) for name in NAMES]
    of_one = {each.text.partition(":")[0] for each in config_problems(shares, 1, None)}
    assert of_one == {name for name in NAMES if not name.startswith("gemm.")}
    assert config_problems([replace(each, is_share=False) for each in shares], 2, None) == []
    found = device_problems(shares, "a laptop", ["fp32", "bf16"], {"fp32": None, "bf16": 1.0})
    assert [each.text.partition(":")[0] for each in found] == [
        "gemm.fp32.tflops", "gemm.tf32.tflops", "gemm.fp16.tflops", "gemm.fp8.tflops",
    ]  # fmt: skip
