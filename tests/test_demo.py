"""The demo: rewards and datums by value, a short run of the whole; nightly, what it claims."""

import json
from dataclasses import replace
from random import Random

import pytest
import tinker

from recipes import demo, demo_view
from recipes.tasks import Problem, is_held_out, reward, sorting, sums


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("02255\n", 1.0), (" 02255 \nmore", 1.0), ("025\n", 0.0), ("02255", 0.0), ("", 0.0)],
)
def test_reward_wants_the_whole_answer_and_the_line_break(completion, expected):
    assert reward(completion, Problem("52052=", "02255")) == expected


def test_held_out_problems_are_a_tenth_and_never_drawn_for_training():
    task = sorting()
    training = task.problems(3000, Random(0))
    held_out = task.problems(200, Random(1), held_out=True)
    assert not any(map(is_held_out, training)) and all(map(is_held_out, held_out))
    share = (
        sum(is_held_out(task.draw(random)) for random in [Random(2)] for _ in range(3000)) / 3000
    )
    assert 0.08 < share < 0.12
    assert held_out == task.problems(200, Random(1), held_out=True)


def test_most_demonstrations_drop_repeated_digits_and_the_rest_are_right():
    task, problem = sorting(), Problem("52052=", "02255")
    seen = [task.demonstrate(problem, random) for random in [Random(0)] for _ in range(2000)]
    assert set(seen) == {"02255\n", "025\n"}
    assert 0.31 < seen.count("02255\n") / len(seen) < 0.39
    distinct = Problem("52170=", "01257")
    assert {task.demonstrate(distinct, Random(i)) for i in range(20)} == {"01257\n"}


def test_sums_are_right():
    for problem in sums().problems(50, Random(0)):
        a, b = problem.prompt.splitlines()[-1].removesuffix(" =").split(" + ")
        assert int(problem.answer) == int(a) + int(b)


def test_datum_gives_the_advantage_to_sampled_tokens_alone_and_says_where_each_came_from():
    sequence = tinker.SampledSequence(
        stop_reason="stop", sequence_id="s:1:0", _tokens_list=[7, 8, 9], _logprobs_list=[-1, -2, -3]
    )
    rollout = demo.Rollout(Problem("", ""), [3, 4], sequence, 1.0)
    made = demo.datum(rollout, [0.5, 0.25, -1.0])
    assert made.model_input.to_ints() == [3, 4, 7, 8]
    rows = {name: tensor.to_numpy().tolist() for name, tensor in made.loss_fn_inputs.items()}
    assert rows == {
        "target_tokens": [4, 7, 8, 9],
        "logprobs": [0, -1, -2, -3],
        "advantages": [0, 0.5, 0.25, -1.0],
    }
    prompt, sampled = tinker.PromptProvenanceSpan, tinker.SampledProvenanceSpan
    assert made.model_input_spans == [
        prompt(sequence_id="s:1:0", length=2),
        sampled(sequence_id="s:1:0", length=2),
    ]
    assert made.loss_fn_input_spans == [
        prompt(sequence_id="s:1:0", offset=1, length=1),
        sampled(sequence_id="s:1:0", length=3),
    ]


def groups_of(*lengths_and_rewards):
    """Groups of rollouts given as (sampled tokens, reward)."""

    def rollout(length, reward):
        sequence = tinker.SampledSequence(
            stop_reason="stop",
            sequence_id="s:1:0",
            _tokens_list=[7] * length,
            _logprobs_list=[-1.0] * length,
        )
        return demo.Rollout(Problem("", ""), [3], sequence, reward)

    return [[rollout(*pair) for pair in group] for group in lengths_and_rewards]


def test_above_the_mean_sums_to_zero_in_a_group():
    groups = groups_of([(2, 1.0), (1, 0.0), (1, 0.0), (1, 0.0)], [(1, 1.0), (1, 1.0)])
    found = demo.above_the_mean(groups)
    assert found == [[0.75, 0.75], [-0.25], [-0.25], [-0.25], [0.0], [0.0]]


def test_whitened_advantages_have_mean_0_and_variance_1_over_tokens():
    """Three tokens earned 1 and one earned 0: mean 3/4, deviation sqrt(3)/4."""
    found = demo.whitened(groups_of([(2, 1.0), (1, 0.0)], [(1, 1.0)]))
    assert found == [pytest.approx(a_T) for a_T in ([3**-0.5] * 2, [-(3**0.5)], [3**-0.5])]


def test_the_control_gets_the_same_advantages_on_other_completions():
    given = [[float(i)] * (1 + i % 3) for i in range(40)]
    found = demo.dealt(given, Random(0))
    assert [len(a_T) for a_T in found] == [len(a_T) for a_T in given]
    assert sorted(a_T[0] for a_T in found) == [a_T[0] for a_T in given]
    assert sum(a_T[0] == i for i, a_T in enumerate(found)) < 5


# ------------------------------------------------------------------ whole runs


def run(folder, monkeypatch, *arguments):
    """A run too short to learn much; its rows by kind."""
    short = replace(
        demo.TINY,
        task=sorting(3),
        warm_steps=40,
        warm_batch=32,
        groups=8,
        held_out=16,
        eval_every=2,
    )
    monkeypatch.setattr(demo, "TINY", short)
    demo.main(["--out", str(folder), "--steps", "3", *arguments])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kinds = ("warm-up", *demo.ALGORITHMS, "control")
    return {kind: [row for row in rows if row["run"] == kind] for kind in kinds}


def test_a_short_run_warms_up_improves_and_leaves_metrics_a_picture_and_a_table(
    tmp_path, monkeypatch, capsys
):
    rows = run(tmp_path, monkeypatch)
    assert [row["step"] for row in rows["warm-up"]] == list(range(1, 41))
    losses = [row["loss:sum"] for row in rows["warm-up"]]
    assert losses[-1] < 0.8 * losses[0]
    learning = [rows[kind] for kind in (*demo.ALGORITHMS, "control")]
    for found in learning:
        assert [row["step"] for row in found if "held_out" in row] == [0, 2, 3]
        assert [row["step"] for row in found if "reward" in row] == [1, 2, 3]
        assert [row["age"] for row in found if "age" in row] == [0, 1, 2]
    # The same weights, the same problems, the same draws; another loss after that.
    for first in ("held_out", "reward"):
        assert len({next(row[first] for row in found if first in row) for found in learning}) == 1
    assert "staleness:max" not in rows["reinforce_pp"][1]
    assert rows["control"][-2]["staleness:max"] == 2
    picture = (tmp_path / "reward.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    shown = capsys.readouterr().out
    for part in ("held-out greedy reward", *demo.ALGORITHMS, "control", "before", "metrics.jsonl"):
        assert part in shown


def test_one_algorithm_alone_and_no_control(tmp_path, monkeypatch):
    words = ("--algorithm", "stable_reinforce", "--stale", "1", "--no-control")
    rows = run(tmp_path, monkeypatch, *words)
    lags = [row["staleness:max"] for row in rows["stable_reinforce"] if "loss:sum" in row]
    assert lags == [0, 1, 1]
    assert not rows["control"] and not rows["reinforce_pp"]


def test_the_curve_takes_several_seeds(tmp_path):
    rows = {
        (seed, kind): [{"step": 0, "held_out": 0.2}, {"step": 1, "reward": 0.3, "held_out": 0.4}]
        for seed in (0, 1)
        for kind in ("reinforce_pp", "stable_reinforce", "control", "warm-up")
    }
    assert demo_view.curve(tmp_path / "c.png", "sorting", rows).stat().st_size > 10_000
    assert demo_view.smooth([1, 2, 3], [0.0, 1.0, 0.5]) == ([1, 2, 3], [0.0, 0.5, 0.5])


def test_health_pools_the_last_updates_and_is_empty_before_the_first():
    update = {"age": 4.0} | {
        f"{name}/{part}:sum": value
        for name, num in {
            "kl_sample_train_v3": 0.5,
            "is_weight": 40.0,
            "is_weight_sq": 50.0,
        }.items()
        for part, value in (("num", num), ("den", 40.0))
    }
    wild = {name: 1e6 for name in update}
    found = demo_view.health([wild] + [update] * 5)
    assert found == pytest.approx({"KL": 0.0125, "ESS": 0.8, "age": 4.0})
    assert demo_view.health([{"reward": 1.0}]) == {}


@pytest.mark.nightly
def test_reinforcement_gains_and_the_control_does_not(tmp_path):
    demo.main(["--out", str(tmp_path), "--seeds", "3"])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for seed in range(3):
        gains = {}
        for kind in (*demo.ALGORITHMS, "control"):
            held_out = [
                row["held_out"]
                for row in rows
                if (row["seed"], row["run"]) == (seed, kind) and "held_out" in row
            ]
            gains[kind] = held_out[-1] - held_out[0]
        assert gains.pop("control") < 0.05
        assert min(gains.values()) >= 0.3, gains
