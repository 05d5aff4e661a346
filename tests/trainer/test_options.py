"""The command line's words, and a help that leaves nothing out."""

import dataclasses

import chz
import pytest
import typer
from typer.testing import CliRunner

from trimtab.errors import Invalid
from trimtab.trainer import cli, options
from trimtab.trainer.config import NOT_OPTIONS, Config, shaping
from trimtab.trainer.reinforce_pp_config import ReinforcePPConfig


def test_later_layers_win():
    config = options.config({"steps": 10, "seed": 3}, {"steps": "20", "reward_clip": "-1,1"})
    assert (config.steps, config.seed, config.reward_clip) == (20, 3, (-1.0, 1.0))


def test_a_saved_copy_makes_the_same_config():
    config = Config(reward_clip=None, wandb_project="p", steps=3, resume=True, base_url=None)
    assert options.config(chz.asdict(config)) == config
    config = Config(reward_clip=(-2.5, 1.0), learning_rate=1e-5)
    assert options.config(chz.asdict(config)) == config


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["learning_rat=1"], "there is no option 'learning_rat'; did you mean learning_rate?"),
        (["zzz=1"], "see trimtab train --help"),
        (["steps"], "write options as key=value"),
    ],
)
def test_unknown_keys_are_refused(words, told):
    with pytest.raises(Invalid, match=told.replace("?", r"\?")):
        options.given(words)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"steps": "many"}, "steps is 'many'; it must be a whole number"),
        ({"progress": "loud"}, "must be one of auto, live, plain, none"),
        ({"inflight": "perhaps"}, "must be true or false"),
        ({"reward_clip": "wide"}, "numbers joined by commas, e.g. -10,10 or None"),
        ({"steps": "-1"}, "steps is -1; it must be at least 1"),
    ],
)
def test_unreadable_values_are_refused(given, told):
    with pytest.raises(Invalid, match=told):
        options.config(given)


def test_help_has_every_option_with_its_default_and_its_meaning():
    text = cli.help_text()
    for name, field in chz.chz_fields(Config).items():
        assert f"\n  {name}=" in text
        assert field._doc, name
        assert field._doc in text


def test_every_option_of_reinforce_pp_can_be_set():
    for field in dataclasses.fields(ReinforcePPConfig):
        if field.name not in NOT_OPTIONS:
            assert getattr(shaping(Config()), field.name) == field.default
            assert chz.chz_fields(Config)[field.name]._doc == field.metadata["doc"]


def test_the_command():
    app = typer.Typer()
    cli.register(app)

    @app.command()
    def other() -> None: ...

    result = CliRunner().invoke(app, ["train", "--help"])
    assert result.exit_code == 0
    assert "max_steps_off_policy=int" in result.output
    assert CliRunner().invoke(app, ["train", "nowhere.py"]).exit_code == 1


def test_errors_of_the_command_are_one_line(capsys, tmp_path):
    assert cli.main(["nowhere.py", "stepz=3"]) == 1
    assert cli.main(["a.py", "b.py"]) == 1
    assert cli.main(["--resume", f"log_path={tmp_path}/none"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: there is no option 'stepz'; did you mean steps?"
    assert lines[1].startswith("error: two tasks are named, a.py and b.py")
    assert lines[2].endswith("holds no run to go on with; check log_path=")
    assert len(lines) == 3
