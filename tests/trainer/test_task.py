"""Task files, JSONL prompts and reasoning-gym, and what is said about bad ones."""

import sys

import pytest

from trimtab.errors import Invalid
from trimtab.trainer.task import Task, load, split_held_out


def file(folder, text, name="my_task.py"):
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_task_file(tmp_path):
    task = load(
        file(
            tmp_path,
            "prompts = ['a', {'prompt': 'b', 'answer': 2}]\n"
            "def held_out(): return [{'prompt': [{'role': 'user', 'content': 'c'}]}]\n"
            "def reward(completion, item): return 1.0\n"
            "stop = '\\n'\n"
            "defaults = {'steps': 7}\n",
        )
    )
    assert task.prompts == ({"prompt": "a"}, {"prompt": "b", "answer": 2})
    assert task.held_out[0]["prompt"][0]["content"] == "c"
    assert (task.stop, task.defaults, task.name) == (("\n",), {"steps": 7}, "my_task")


def test_a_task_file_reads_jsonl_beside_it_and_its_neighbours(tmp_path):
    file(tmp_path, "def score(c, i): return 0.5\n", "neighbour_of_task.py")
    file(tmp_path, '{"prompt": "a"}\n\n"b"\n', "p.jsonl")
    task = load(
        file(tmp_path, "from neighbour_of_task import score as reward\nprompts = 'p.jsonl'\n")
    )
    assert [item["prompt"] for item in task.prompts] == ["a", "b"]
    assert task.reward("", {}) == 0.5
    del sys.modules["neighbour_of_task"]


def test_jsonl_prompts_with_a_reward_of_their_own(tmp_path):
    prompts = file(tmp_path, '{"prompt": "a", "answer": "1"}\n', "p.jsonl")
    function = file(tmp_path, "def score(completion, item): return completion == item['answer']\n")
    task = load(prompts, reward=f"{function}:score")
    assert task.reward("1", task.prompts[0])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompts = ['a']", "has no `reward`; define it: a function of"),
        ("def reward(c, i): return 0", "has no `prompts`"),
        ("prompts = ['a']\nreward = 'yes'", "reward is of type str; it must be a function"),
        ("prompts = []\ndef reward(c, i): return 0", "there are no prompts"),
        ("prompts = [3]\ndef reward(c, i): return 0", r"prompts\[0\] is of type int"),
        ("prompts = ['']\ndef reward(c, i): return 0", r"prompts\[0\]: the prompt is empty"),
        ("prompts = [{'prompt': ['x']}]\ndef reward(c, i): return 0", "role and content"),
        ("x = 1\n1 / 0", r"my_task.py:2 raised ZeroDivisionError at import"),
        ("import sys\nsys.exit(2)", r"my_task.py:2 raised SystemExit at import: 2"),
        ("import nothing_of_that_name", "raised ModuleNotFoundError at import: No module"),
        ("def (", "my_task.py:1 raised SyntaxError"),
        ("prompts = 3\ndef reward(c, i): return 0", "must be a list, a function that returns one"),
    ],
)
def test_a_bad_task_file_is_told_in_a_sentence(tmp_path, text, words):
    with pytest.raises(Invalid, match=words):
        load(file(tmp_path, text))


def test_bad_jsonl_is_told_by_its_line(tmp_path):
    reward = file(tmp_path, "def f(c, i): return 0\n") + ":f"
    with pytest.raises(Invalid, match=r"p.jsonl:2: not JSON"):
        load(file(tmp_path, '{"prompt": "a"}\n{"prompt"\n', "p.jsonl"), reward=reward)
    with pytest.raises(Invalid, match=r"give reward=my_reward.py:function"):
        load(str(tmp_path / "p.jsonl"))
    with pytest.raises(Invalid, match="no function `g`"):
        load(file(tmp_path, '"a"\n', "q.jsonl"), reward=reward[:-1] + "g")
    with pytest.raises(Invalid, match="cannot read the prompts"):
        load(str(tmp_path / "none.jsonl"), reward=reward)


def test_no_task_and_no_file():
    with pytest.raises(Invalid, match="there is no task; name a file"):
        load("")
    with pytest.raises(Invalid, match="does not exist"):
        load("nowhere.py")


def test_reasoning_gym_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(Invalid, match="pip install reasoning-gym"):
        load("reasoning_gym:chain_sum")


def test_held_out_prompts_are_split_off():
    task = split_held_out(Task([str(i) for i in range(10)], len), 0.2)
    assert [i["prompt"] for i in task.held_out] == ["8", "9"]
    assert len(task.prompts) == 8
    own = Task(["a", "b"], len, held_out=["c"])
    assert split_held_out(own, 0.5) is own
    with pytest.raises(Invalid, match="keeps 0 of 2 prompts"):
        split_held_out(Task(["a", "b"], len), 0.01)
