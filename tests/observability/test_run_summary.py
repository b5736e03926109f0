import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.observability.report import Call, Chart, Episode, Piece, curve_points, write_report
from slime.observability.run_summary import eval_results, read_lines, step_rows, wilson_interval

LINES = [
    {"step_key": "eval/step", "eval/step": 0, "eval/greedy": 0.25, "eval/greedy/n": 200},
    {"step_key": "rollout/step", "rollout/step": 0, "rollout/raw_reward": 0.5},
    {"step_key": "train/step", "train/step": 0, "train/rollout_id": 0, "train/loss": 9.0},
    {"step_key": "rollout/step", "rollout/step": 0, "perf/rollout_time": 3.0},
    {"step_key": "train/step", "train/step": 0, "train/rollout_id": 0, "train/loss": 1.0, "train/kl_loss": 0.0},
    {"step_key": "eval/step", "eval/step": 0, "eval/greedy": 0.75, "eval/greedy/n": 200},
]


def test_rows_join_the_rollout_and_a_repeated_step_counts_once() -> None:
    (row,) = step_rows(LINES)
    assert (row["step"], row["rollout"], row["reward"], row["loss"], row["kl"]) == (0, 0, 0.5, 1.0, 0.0)
    assert row["seconds"]["rollout"] == 3.0
    assert row["grad_norm"] is None and row["seconds"]["train"] is None


def test_evaluations_keep_their_order_and_only_rates() -> None:
    assert eval_results(LINES) == [{"greedy": 0.25}, {"greedy": 0.75}]


def test_a_missing_metrics_file_is_an_empty_run(tmp_path) -> None:
    assert read_lines(tmp_path / "none.jsonl") == []


def test_wilson_interval_golden() -> None:
    low, high = wilson_interval(0.5, 100)
    assert (low, high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert wilson_interval(0.0, 10)[0] == pytest.approx(0.0) and wilson_interval(1.0, 10)[1] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="n=0"):
        wilson_interval(0.5, 0)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_contains_the_rate(case: tuple[int, int]) -> None:
    hits, n = case
    low, high = wilson_interval(hits / n, n)
    assert 0 <= low <= hits / n + 1e-12 and hits / n - 1e-12 <= high <= 1


def test_curve_points_skip_what_was_not_logged() -> None:
    points, low, high = curve_points([1.0, None, 3.0])
    assert len(points) == 2 and (low, high) == (1.0, 3.0)
    assert points[0][1] > points[1][1], "a larger value stands higher"
    assert curve_points([None]) == ([], 0.0, 0.0)


def test_report_escapes_model_text_and_needs_no_network(tmp_path) -> None:
    summary = {"method": "m", "model": "tiny", "num_rollouts": 2, "seed": 0, "seconds": 1.0, "n_eval": 10}
    summary |= {"eval_before": 0.2, "eval_after": 0.8, "ci95_before": (0.1, 0.3), "ci95_after": (0.7, 0.9)}
    summary |= {"eval_before_sampled": 0.1, "eval_after_sampled": 0.6}
    calls = (Call("planner", "x", (Piece("<script>", "trained"),)), Call("tool", "</pre><b>"))
    episode = Episode("Before", "1 < 2 ?", "yes", 0.0, calls)
    chart = Chart("Accuracy by chunks", ["4", "32"], {"all": [0.9, 0.8]})
    write_report(tmp_path / "report.html", summary, step_rows(LINES), [episode], "Only the planner.", [chart])
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "&lt;/pre&gt;" in page
    assert "http" not in page.replace("http-equiv", "")
    assert json.dumps(80.0)[:2] in page and "n = 10" in page
