"""Simulations: ranks that others wait for are named within 3 steps, equally fast ranks are not."""

import numpy as np
import pytest

from lightning_llm.health.outliers import medians_of_others
from lightning_llm.health.stragglers import PARTS, WAIT, RankSeconds, StragglerDetector
from tests.health.step_noise import TAILS, clean_steps, named, steps_to_name

COMPUTE = PARTS.index("compute")


def rows(steps: int, seed: int = 0, jitter: float = 0.01, ranks: int = 4) -> list[np.ndarray]:
    return list(clean_steps("normal", jitter, steps, seed, ranks))


def events(detector: StragglerDetector, seconds: list[np.ndarray]) -> list[tuple[int, str, int | None, bool]]:
    return [
        (step, each.work, each.rank, each.over)
        for step, row in enumerate(seconds, 1)
        for each in detector.take(step, row)
    ]


def test_medians_of_others_are_those_without_each():
    rng = np.random.default_rng(0)
    for count in (2, 3, 4, 7):
        values = rng.integers(0, 4, count).astype(float).tolist()
        expected = [sorted(values[:i] + values[i + 1 :])[(count - 1) // 2] for i in range(count)]
        assert medians_of_others(values) == expected


@pytest.mark.parametrize("tail", TAILS)
def test_200_clean_steps_name_no_straggler(tail):
    assert named(clean_steps(tail, 0.01, 200, 1)) == []


def test_false_alarms_keep_their_rate_where_tails_are_heavy():
    assert len(named(clean_steps("Student's t, 3 degrees of freedom", 0.03, 2000, 2))) <= 1
    worst = named(clean_steps("Pareto, exponent 1.5 (no variance)", 0.03, 1000, 3))
    assert len(worst) <= 5


def test_a_rank_20_per_cent_slower_is_named_within_3_steps():
    assert [steps_to_name("normal", 0.01, seed) for seed in range(10)] == [3] * 10
    assert max(steps_to_name("normal", 0.02, seed) for seed in range(5)) <= 6


def test_a_slow_rank_hidden_by_noise_is_named_eventually():
    after = [steps_to_name("normal", 0.08, seed) for seed in range(3)]
    assert max(after) <= 128 * 3


def test_the_start_the_size_and_the_end_of_a_slowdown_are_reported():
    seconds = rows(80)
    for row in seconds[40:60]:
        row[2, COMPUTE] += 0.2
        row[[0, 1, 3], WAIT] += 0.2
    detector = StragglerDetector([range(4)])
    found = [each for step, row in enumerate(seconds, 1) for each in detector.take(step, row)]
    slow, over = found
    assert (slow.rank, slow.work, slow.since_step, slow.over) == (2, "compute", 41, False)
    assert slow.seconds - slow.usual_seconds == pytest.approx(0.2, abs=0.03)
    assert slow.share == pytest.approx(0.2 / 1.3, abs=0.03)
    assert (over.rank, over.over) == (2, True)
    assert 61 <= over.since_step <= 61 + 8


def test_one_long_step_or_two_are_no_straggler():
    seconds = rows(100)
    for step in (20, 40, 41, 60, 80, 81):
        seconds[step][1, COMPUTE] *= 4
    assert events(StragglerDetector([range(4)]), seconds) == []


@pytest.mark.parametrize("part", PARTS)
def test_each_part_has_its_own_name(part):
    seconds = rows(40)
    for row in seconds[30:]:
        row[3, PARTS.index(part)] += 0.4
    assert events(StragglerDetector([range(4)]), seconds) == [(33, part, 3, False)]


def test_stages_of_a_pipeline_are_compared_with_their_replicas_alone():
    seconds = rows(60)
    for row in seconds:
        row[2:, COMPUTE] *= 1.5  # the second stage has more to do
    stages = [[0, 1], [2, 3]]
    assert events(StragglerDetector(stages), [row.copy() for row in seconds]) == []
    assert events(StragglerDetector([range(4)]), [row.copy() for row in seconds]) != []
    for row in seconds[40:]:
        row[3, COMPUTE] += 0.4
    assert events(StragglerDetector(stages), seconds) == [(43, "compute", 3, False)]


def test_a_stage_without_replicas_is_compared_by_data_loading_only():
    seconds = rows(60, ranks=2)
    for row in seconds[40:]:
        row[1, COMPUTE] += 0.4
    assert events(StragglerDetector([[0], [1]]), [row.copy() for row in seconds]) == []
    for row in seconds[40:]:
        row[1, PARTS.index("data")] += 0.4
    assert events(StragglerDetector([[0], [1]]), seconds) == [(43, "data", 1, False)]


def test_rank_0_writes_records_and_is_compared_with_itself():
    seconds = rows(60)
    rest = PARTS.index("rest")
    for row in seconds:
        row[0, rest] += 0.5  # as ever
    assert events(StragglerDetector([range(4)]), [row.copy() for row in seconds]) == []
    for row in seconds[40:]:
        row[0, rest] += 0.5  # its disk has become slow
    assert events(StragglerDetector([range(4)]), seconds)[0] == (43, "rest", 0, False)


def test_links_are_slow_if_all_ranks_wait_and_none_is_late():
    seconds = rows(80)
    for row in seconds[40:60]:
        row[:, WAIT] += 0.5
    assert events(StragglerDetector([range(4)]), seconds)[:1] == [(43, "links", None, False)]
    assert [each[1:] for each in events(StragglerDetector([range(4)]), seconds)[1:]] == [("links", None, True)]


def test_unknown_seconds_are_not_judged():
    seconds = rows(60)
    for row in seconds:
        row[:, PARTS.index("rest")] = np.nan
        row[:, PARTS.index("data")] = np.nan
    for row in seconds[40:]:
        row[1, COMPUTE] += 0.4
    assert events(StragglerDetector([range(4)]), seconds) == [(43, "compute", 1, False)]


def test_figures_of_ranks():
    figures, seconds = RankSeconds(["a", "b"]), rows(40, ranks=2)
    for row in seconds[:32]:
        figures.add(row)
    found, whole = figures.since_last(), np.stack(seconds[:32])
    assert found["rank_compute_seconds/1"] == pytest.approx(np.median(whole[:, 1, COMPUTE]))
    middle, high = np.percentile(whole[:, 0, COMPUTE], [50, 95])
    assert found["rank_jitter/0"] == pytest.approx(high / middle - 1)
    assert found["rank_data_seconds/0"] == pytest.approx(whole[:, 0, 0].mean())
    for row in seconds[32:]:
        figures.add(row)
    total = figures.of_all_steps()
    assert [(each["rank"], each["host"], each["steps"]) for each in total] == [(0, "a", 40), (1, "b", 40)]
    assert total[1]["wait_seconds"] == pytest.approx(np.stack(seconds)[:, 1, WAIT].sum(), abs=1e-5)
