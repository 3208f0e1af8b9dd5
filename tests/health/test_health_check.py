"""The check of ranks: numbers planted wrong and a rank planted slow are found and named, clean ranks are not."""

import json
import platform
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml

from lightning_llm.base.errors import UnhealthyError
from lightning_llm.cli.health import Threshold, failing_lines
from lightning_llm.config.compose import compose_config
from lightning_llm.health import communication as collectives
from lightning_llm.health import communication as links
from lightning_llm.health import devices as speeds
from lightning_llm.health.check import check_health
from lightning_llm.health.devices import Extent
from lightning_llm.health.ranks import Ranks
from lightning_llm.health.report import print_report, verdict_lines, write_measured
from lightning_llm.plan.check import check_config
from lightning_llm.plan.time.links import read_links
from lightning_llm.run.opening import refuse_unhealthy

TINY = Extent((1 << 10, 1 << 14), 0.002, 64, 1 << 14, 1 << 14, link_bytes=1 << 12, disk_bytes=1 << 22)
WRONG_ONLY = replace(TINY, link_bytes=None, disk_bytes=None, sizes_bytes=(1 << 10,))
CPU, HERE = torch.device("cpu"), platform.node()
LEAST = 4.0
"""By which a rank is slow here: these machines are shared, and the work is over in microseconds."""
PAUSE_SECONDS = 0.01


def ranks_here(group=None, timeout_seconds: float = 60.0) -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size(), timeout_seconds, group)


def measured(folder: str):
    return check_health(ranks_here(), CPU, TINY, Path(folder) / "run", LEAST)


@pytest.fixture(scope="module")
def clean(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean")
    report = ranks(4).call(measured, str(folder))
    assert list(folder.iterdir()) == []
    return report


def test_clean_ranks_are_measured_and_nothing_is_found(clean):
    assert (clean.wrong, clean.slow) == ([], [])
    assert [each.rank for each in clean.ranks] == [0, 1, 2, 3]
    assert [(each.collective, each.size_bytes) for each in clean.collectives] == [
        (name, size) for name in collectives.BUS_FACTORS for size in TINY.sizes_bytes
    ]
    assert all(set(each.tflops) == {"fp32", "bf16"} and min(each.tflops.values()) > 0 for each in clean.ranks)
    assert all(each.verified_bytes == TINY.verify_bytes for each in clean.ranks)
    rates = clean.links.gb_per_second
    assert all((rate > 0) == (a != b) for a, row in enumerate(rates) for b, rate in enumerate(row))
    assert list(clean.disks) == [HERE]


def test_the_report_is_a_table_data_and_verdicts(clean, capsys):
    print_report(clean)
    said = capsys.readouterr().out
    for each in ("bus GB/s", "fp32 TFLOP/s", "p2p GB/s, 4,096 bytes", "fsync ms", f"3 {HERE}", "16,384"):
        assert each in said
    assert list(verdict_lines(clean, [])) == ["healthy    values are right, and no rank is slow"]
    data = json.loads(json.dumps(clean.as_data()))
    assert data["collectives"][1]["bus_gb_per_second"] == pytest.approx(
        1.5 * data["collectives"][1]["size_bytes"] / data["collectives"][1]["seconds"] / 1e9
    )
    assert (data["wrong"], len(data["p2p"]["gb_per_second"])) == ([], 4)


def test_figures_below_a_threshold_are_named_with_where(clean):
    cluster = compose_config(["cluster=h100_dgx"]).cluster
    thresholds = [
        Threshold("disk.free_bytes", 1.0, is_share=False),
        Threshold("gemm.bf16.tflops", 1e6, is_share=False),
        Threshold("p2p.gb_per_second", 0.9, is_share=True),
    ]
    found = failing_lines(clean, thresholds, cluster)
    assert len(found) == 4 + 12
    assert any(each.startswith("gemm.bf16.tflops is ") and f"on rank 2 ({HERE}), below 1e+06" in each for each in found)
    assert any(f"on rank 3 ({HERE}) to rank 1 ({HERE}), below 90% of 450" in each for each in found)


def test_plan_reads_what_was_measured(clean, tmp_path):
    written = write_measured(clean, 4, tmp_path)
    assert [each.split()[0] for each in written] == ["written", "written"]
    matrix = read_links(tmp_path / "links.yaml", 1, 4)
    assert matrix.names == tuple(f"{HERE} rank {rank}" for rank in range(4))
    assert matrix.gb_per_second[1][2] == pytest.approx(clean.links.gb_per_second[1][2], rel=1e-3)
    config = compose_config(
        ["cluster=measured", "trainer.devices=4", "parallel=ddp", "data.micro_batch_size=1"], tmp_path
    )
    plan = check_config(config)
    assert plan.config.cluster.devices_per_node == 4
    assert set(plan.config.cluster.peak_tflops) == {"fp32", "bf16"}
    assert yaml.safe_load((tmp_path / "cluster" / "measured.yaml").read_text())["hardware"] == "cpu"


@contextmanager
def planted(rank: int, owner, name: str, fault):
    """Have `rank` call `fault(original, ...)` in place of `owner.name`."""
    original = getattr(owner, name)
    changed = mock.patch.object(owner, name, lambda *given, **named: fault(original, *given, **named))
    with changed if dist.get_rank() == rank else mock.patch("time.tzset"):
        yield


def adds_too_much(reduce, tensor, *given, **named):
    if tensor.numel() > 1:  # not where ranks only meet
        tensor[5] += 1
    return reduce(tensor, *given, **named)


def scatters_wrong(reduce_scatter, output, tensor, group):
    tensor[-1] += 4
    reduce_scatter(output, tensor, group)


def gathers_wrong(all_gather, output, tensor, group):
    tensor[0] = 0
    all_gather(output, tensor, group)


def wrong_sums() -> list[str]:
    with planted(2, dist, "all_reduce", adds_too_much):
        found = check_health(ranks_here(), CPU, WRONG_ONLY).wrong
    with planted(3, collectives, "reduce_scatter", scatters_wrong):
        found += check_health(ranks_here(), CPU, WRONG_ONLY).wrong
    with planted(1, collectives, "all_gather", gathers_wrong):
        return found + check_health(ranks_here(), CPU, WRONG_ONLY).wrong


@pytest.mark.full
def test_a_wrong_sum_is_detected_with_the_rank_at_fault(ranks):
    summed, scattered, gathered = ranks(4).call(wrong_sums)
    assert summed.startswith(f"all_reduce of 1,024 bytes: wrong contribution of rank 2 ({HERE}); 1 element on rank 0: ")
    assert "the first, at index 5, is " in summed
    assert scattered.startswith(f"reduce_scatter of 1,024 bytes: wrong contribution of rank 3 ({HERE}); 1 element on ")
    assert gathered.startswith(f"all_gather of 1,024 bytes: wrong: data sent by rank 1 ({HERE}); ")


def wrong_on_two() -> tuple[list[str], str]:
    with planted(1, dist, "all_reduce", adds_too_much):
        found = check_health(ranks_here(), CPU, WRONG_ONLY).wrong
        try:
            refuse_unhealthy(ranks_here(), CPU)
        except UnhealthyError as error:
            return found, str(error)
    return found, ""


def test_of_two_ranks_both_are_named_and_no_run_starts(ranks):
    (found,), refused = ranks(2).call(wrong_on_two)
    both = f"wrong contribution of one of rank 0 ({HERE}), rank 1 ({HERE})"
    assert both in found
    assert refused.startswith("trainer.health: all_reduce of 65,536 bytes: ")
    assert both in refused


def slow_pauses(run, *given):
    time.sleep(PAUSE_SECONDS)
    return run(*given)


def slow_and_wrong_messages() -> tuple[list[str], list[str]]:
    with (
        planted(2, speeds.SquareProduct, "run", slow_pauses),
        planted(1, links.Messages, "_look", lambda look, its, got, peer: look(its, got + (peer == 3), peer)),
    ):
        report = check_health(ranks_here(), CPU, replace(TINY, disk_bytes=None), None, LEAST)
    return report.slow_lines(), report.wrong


def test_a_slow_rank_is_named_with_its_host_and_a_wrong_message_with_its_pair(ranks):
    slow, wrong = ranks(4).call(slow_and_wrong_messages)
    assert [each.partition(" takes ")[0] for each in slow] == [f"rank 2 ({HERE})"] * 2
    assert "times as long as the others for fp32 GEMM: more than 5 times in " in slow[0]
    assert [each.partition(";")[0] for each in wrong] == [
        f"messages: wrong: data sent from rank 3 ({HERE}) to rank 1 ({HERE})"
    ]


def waits_in_vain() -> list[str]:
    """Return each rank's error if rank 1 never reaches the first collective."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    here = ranks_here(group, 0.5)
    said = ""
    if here.rank == 1:
        time.sleep(1.2)
    else:
        try:
            check_health(here, CPU, WRONG_ONLY)
        except UnhealthyError as error:
            said = f"{error}{'!' if error.reports else ''}"
    found = [""] * here.world
    dist.all_gather_object(found, said)
    return found


def test_a_rank_that_never_comes_is_named_once(ranks):
    said = ranks(4).call(waits_in_vain)
    expected = (
        f"all_reduce of 1,024 bytes: rank 1 ({HERE}) did not reach it: it was last in the first meeting; the others "
        "waited (parallel.timeout_seconds=0.5)"
    )
    assert [each.rstrip("!") for each in said] == [expected, "", expected, expected]
    assert "".join(said).count("!") == 1
