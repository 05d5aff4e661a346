"""The recipes' own functions, and that each is a task the trainer takes."""

import random
from pathlib import Path

import pytest

from recipes import arithmetic, capitals, guess_number, preference
from trimtab import tiny
from trimtab.trainer import Completion, options
from trimtab.trainer.task import from_file


@pytest.mark.parametrize("module", [arithmetic, guess_number, preference])
def test_a_recipe_is_a_task_with_options_that_exist(module):
    task = from_file(Path(module.__file__))
    assert task.held_out
    options.config(task.defaults, {"start_from": "tinker://a/weights/b"})
    text = "".join(part for part, _ in module.demonstrate(random.Random(0)))
    assert text.endswith("\n")
    assert set(text) <= set(tiny.CHARACTERS)


def test_no_held_out_sum_is_trained_on():
    trained = {item["prompt"] for item in arithmetic.prompts}
    assert not trained & {item["prompt"] for item in arithmetic.held_out}
    assert arithmetic.reward(Completion(" 7"), {"answer": "7"}) == 1.0
    assert arithmetic.reward(Completion("17"), {"answer": "7"}) == 0.0


def test_no_held_out_word_is_trained_on_and_copying_it_earns_nothing():
    trained = {item["prompt"] for item in capitals.prompts}
    assert len(trained) == len(capitals.prompts)
    assert not trained & {item["prompt"] for item in capitals.held_out}
    item = capitals.held_out[0]
    copied = item["answer"].lower()
    assert item["prompt"].endswith(f"\n{copied} ->")
    assert capitals.reward(Completion(f" {item['answer']}"), item) == 1.0
    assert capitals.reward(Completion(f" {copied}"), item) == 0.0
    assert capitals.reward(Completion(f" {item['answer']}", truncated=True), item) == 0.0


def test_a_number_is_found_in_time_or_not():
    item = {"prompt": guess_number.OPENING, "number": 7}
    assert guess_number.reply(Completion("5"), item) == ">\n"
    assert guess_number.reply(Completion("seven"), item) == "!\n"
    found = Completion("7", turns=["5", "7"], replies=[">\n"])
    assert guess_number.reply(found, item) is None
    assert guess_number.reward(found, item) == 1.0
    assert guess_number.reward(Completion("6", turns=["5", "6"]), item) == 0.0


def test_the_reward_model_learned_the_reader_s_taste():
    def score(text):
        return preference.reward(Completion(text), {})

    assert score("the hen ate") > score("the cat ate") > score("the cat dug")
    assert score("the hen sat") > score("the dog sat")
