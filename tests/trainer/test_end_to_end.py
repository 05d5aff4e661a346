"""The whole trainer against a server in another process, with a tiny random model."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from trimtab.errors import Invalid
from trimtab.trainer import Config, Task, checkpoints, train
from trimtab.trainer.cli import main
from trimtab.trainer.folder import Folder
from trimtab.trainer.stopped import Stopped

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]


def digits(completion, item):
    return sum(c in "0123456789" for c in completion) / 4


DIGITS = Task(SUMS, digits, held_out=SUMS[:3], name="digits")

TASK_FILE = """
import time
prompts = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
held_out = prompts[:3]

def reward(completion, item):
    time.sleep(0.02)
    return sum(c in "0123456789" for c in completion) / 4
"""


SMALL = dict(
    progress="none",
    steps=2,
    groups_per_batch=2,
    group_size=3,
    max_tokens=4,
    lora_rank=4,
    learning_rate=1e-2,
    eval_every=0,
    report=False,
)


def config(server, path, **options):
    return Config(base_url=server, log_path=str(path), **SMALL | options)


def lines(path):
    """metrics.jsonl without what a clock measured."""
    found = Folder(path).lines("metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in found]


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("reinforce_pp", {}),
        ("reinforce_pp_baseline", {"minibatches": 2, "epochs": 2, "compute_post_kl": True}),
        ("stable_reinforce", {"inflight": True}),
        ("grpo", {"loss": "gspo"}),
        ("rloo", {"reference": "base", "kl_penalty_coef": 0.1}),
    ],
)
def test_every_algorithm_trains(server, tmp_path, algorithm, options):
    result = train(config(server, tmp_path, algorithm=algorithm, **options), DIGITS)
    assert [line["step"] for line in result.metrics] == [0, 1]
    last = result.metrics[-1]
    assert last["optim/steps"] == options.get("minibatches", 1) * options.get("epochs", 1)
    assert last["optim/grad_norm"] > 0
    # The sampler is this learner, one step of both in turns: no gap but rounding.
    assert abs(last["optim/kl_sample_train_v1"]) < (1e-4 if options.get("epochs") is None else 1)
    assert last["staleness/max"] == 0
    assert result.checkpoint.startswith("tinker://")
    assert result.sampler.startswith("tinker://")


def test_the_ratio_is_one_at_a_first_update(server, tmp_path):
    """π_old recomputed: bit-equal to the learner, so that clipping is inert."""
    result = train(config(server, tmp_path, algorithm="reinforce_pp"), DIGITS)
    for line in result.metrics:
        assert line["optim/is_weight"] == line["optim/is_weight_max"] == 1.0
        assert line["optim/clip_frac_low"] == line["optim/clip_frac_high"] == 0.0


def test_it_learns_what_the_reward_asks(server, tmp_path):
    """A quarter of the tokens are digits by chance; a few steps make most of them digits."""
    options = dict(steps=6, groups_per_batch=4, group_size=4, eval_every=6, lora_rank=8)
    result = train(config(server, tmp_path, **options), DIGITS)
    assert result.metrics[0]["env/all/reward/total"] < 0.45
    assert result.metrics[-1]["test/greedy/reward/total"] > 0.7


def test_dual_clip_and_a_reference_loss_run_on_this_side(server, tmp_path):
    options = dict(reference="base", kl_loss_coef=0.1, dual_clip=3.0, minibatches=2)
    result = train(config(server, tmp_path, algorithm="reinforce_pp_baseline", **options), DIGITS)
    first, second = result.metrics
    # Adapters begin at zero, so the first half of the first step is the reference itself.
    assert first["optim/kl_loss_k2"] < second["optim/kl_loss_k2"]
    assert first["optim/clip_frac_dual"] == 0.0


@pytest.mark.parametrize("algorithm", ["stable_reinforce", "reinforce_pp"])
def test_several_turns_are_one_datum(server, tmp_path, algorithm):
    """The server checks the spans of every sequence; replies are masked."""
    seen = []

    def reply(completion, item):
        return f"\n{item['answer']}?" if len(completion.turns) < 3 else None

    def reward(completion, item):
        seen.append(completion)
        return digits(completion, item)

    task = Task(SUMS, reward, reply=reply, name="turns")
    result = train(config(server, tmp_path, algorithm=algorithm, max_tokens=3), task)
    assert all(len(c.turns) == 3 and len(c.replies) == 2 for c in seen)
    last = result.metrics[-1]
    assert last["env/all/turns_per_episode"] == 3
    assert last["optim/num_action_tokens:sum"] <= last["env/all/total_ac_tokens"]
    assert last["optim/provenance_unverified:sum"] == 0
    assert abs(last["optim/kl_sample_train_v1"]) < 1e-4


@pytest.mark.parametrize("lag", [1, 2])
def test_sampling_ahead_is_bounded_and_loses_nothing(server, tmp_path, lag):
    options = dict(algorithm="stable_reinforce", steps=5, max_steps_off_policy=lag)
    result = train(config(server, tmp_path, **options), DIGITS)
    ages = [line["staleness/max"] for line in result.metrics]
    assert max(ages) == lag
    assert ages[0] == 0
    assert [line["batch/trained_sequences"] for line in result.metrics] == [6] * 5
    assert result.metrics[-1]["optim/tv_max"] > 0  # an older sampler is another policy


def test_rewards_that_fail_are_left_out_and_told(server, tmp_path):
    calls = iter(range(100))

    def reward(completion, item):
        n = next(calls) % 6
        if n == 0:
            raise ValueError("no")
        return [1.0, None, float("nan"), "1", 0.5, 1][n]

    result = train(config(server, tmp_path, steps=1), Task(SUMS, reward))
    line = result.metrics[0]
    assert line["env/all/reward_failures"] == 4
    assert line["batch/trained_sequences"] == 2
    assert line["env/all/reward/total"] == 0.75
    kinds = {f["failure"].partition(":")[0] for f in Folder(tmp_path).lines("failures.jsonl")}
    assert kinds == {"raised", "none", "nan", "type"}


def test_a_batch_without_rewards_makes_no_update(server, tmp_path):
    result = train(config(server, tmp_path), Task(SUMS, lambda c, i: None))
    assert [line["batch/trained_sequences"] for line in result.metrics] == [0, 0]
    assert "optim/grad_norm" not in result.metrics[0]


# --------------------------------------------------------------- never lose a run

RUN = dict(
    algorithm="reinforce_pp",
    steps=4,
    reward_norm="running",
    minibatches=2,
    eval_every=2,
    keep_every=0,
)


@pytest.fixture(scope="module")
def uninterrupted(server, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    train(config(server, path, **RUN), DIGITS)
    return lines(path)


def test_a_resumed_run_is_the_uninterrupted_one(server, tmp_path, uninterrupted):
    train(config(server, tmp_path, **RUN | {"steps": 2}), DIGITS)
    with pytest.raises(Invalid, match="holds a run at step 2"):
        train(config(server, tmp_path, **RUN), DIGITS)
    train(config(server, tmp_path, **RUN | {"resume": True}), DIGITS)
    assert_same(lines(tmp_path), uninterrupted)


def test_a_server_that_is_not_there_is_told_at_once(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(Stopped, match=f"nothing answers at {url} .*trimtab serve"):
            train(config(url, tmp_path), DIGITS)
    assert time.monotonic() - begun < 10


def test_a_checkpoint_that_the_server_does_not_know_is_told_at_once(server, tmp_path):
    with pytest.raises(Stopped, match=r"does not know start_from=tinker://a/weights/b; name"):
        train(config(server, tmp_path / "new", start_from="tinker://a/weights/b"), DIGITS)
    train(config(server, tmp_path, steps=1), DIGITS)
    with Folder(tmp_path) as folder:
        gone = folder.state().checkpoint.replace("/weights/", "/weights/not-")
        folder.write_state(replace(folder.state(), checkpoint=gone))
    with pytest.raises(Stopped, match=r"does not know the run's checkpoint .*; name another"):
        train(config(server, tmp_path, steps=2, resume=True), DIGITS)


def assert_same(found, expected):
    """Bit for bit, but for what is computed from the sampler's log-probabilities: those carry the
    rounding of whatever was sampled beside them."""
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4]
    for line, other in zip(found, expected, strict=True):
        assert line.keys() == other.keys()
        for name in line.keys() - {"progress/done_frac"}:
            rounded = name.startswith(("optim/kl_sample_train", "optim/entropy"))
            assert line[name] == (pytest.approx(other[name], abs=1e-6) if rounded else other[name])


def test_a_killed_run_loses_the_step_in_progress_at_most(server, tmp_path, uninterrupted):
    task, path = tmp_path / "digits.py", tmp_path / "run"
    task.write_text(TASK_FILE)
    words = [f"{k}={v}" for k, v in (RUN | {"task": task}).items()]
    words += [f"base_url={server}", f"log_path={path}"]
    words += [f"{k}={v}" for k, v in SMALL.items() if k not in RUN]
    process = subprocess.Popen([sys.executable, "-c", MAIN, *words])
    state = path / "state.json"
    while not state.exists() or json.loads(state.read_text())["step"] < 2:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = Folder(path).state().step
    assert len(Folder(path).lines("metrics.jsonl")) - done in (0, 1)
    assert main([*words, "--resume"]) == 0
    assert_same(lines(path), uninterrupted)


MAIN = "import sys; from trimtab.trainer.cli import main; sys.exit(main(sys.argv[1:]))"


def test_the_rolling_checkpoint_in_use_is_never_written_over():
    current, used = None, []
    for done in range(1, 8):
        name = checkpoints.name(Config(steps=99, keep_every=3), done, current)
        assert current is None or name != current.rpartition("/")[2]
        current = f"tinker://a:train:0/weights/{name}"
        used.append(name)
    assert used[:3] == ["rolling-1", "rolling-2", "step-000003"]


def test_what_an_earlier_session_left_behind_is_known():
    old, new = "tinker://a:train:0/weights/rolling-1", "tinker://b:train:0/weights/rolling-1"
    assert checkpoints.left_behind(old, new) == (old,)
    assert checkpoints.left_behind(old, old.replace("1", "2")) == ()
    assert checkpoints.left_behind("tinker://a:train:0/weights/step-000004", new) == ()


# --------------------------------------------------------------- the client side alone

HOOKED = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        rooms = ("trimtab.wire", "trimtab.service", "trimtab.engine", "trimtab.losses",
                 "trimtab.server", "trimtab.embedded", "trimtab.config")
        if name.startswith(rooms):
            raise AssertionError(f"the trainer imported {name}")

sys.meta_path.insert(0, Refuse())
from trimtab.trainer.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_trainer_imports_nothing_of_the_server(server, tmp_path):
    task = tmp_path / "digits.py"
    task.write_text(TASK_FILE)
    words = f"{task} base_url={server} log_path={tmp_path}/run steps=1 groups_per_batch=1"
    words += " group_size=2 max_tokens=2 lora_rank=2 dual_clip=3 kl_penalty_coef=0.1"
    words += " reference=base transcripts=1"
    command = [sys.executable, "-c", HOOKED, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stderr
    assert (tmp_path / "run" / "report.png").exists()
