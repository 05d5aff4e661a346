"""A reasoning-gym task, for a pretrained model: `trimtab train recipes/puzzles.py model=...`.

Needs `pip install reasoning-gym` (puzzles are generated, nothing is downloaded). Small models
answer in sentences, so the last whole number counts. Any other task of the package goes without a
file: `trimtab train reasoning_gym:spell_backward model=...`.
"""

from __future__ import annotations

import sys

from trimtab.trainer.reasoning_gym_task import reasoning_gym_task

puzzles = reasoning_gym_task("count_bits", min_n=1, max_n=15, extract="last_integer")
prompts, held_out, reward = puzzles.prompts, puzzles.held_out, puzzles.reward
defaults = {
    "steps": 50,
    "groups_per_batch": 8,
    "group_size": 8,
    "learning_rate": 5e-5,
    "max_tokens": 48,
    "eval_every": 10,
}

if __name__ == "__main__":
    from trimtab.trainer.cli import main

    sys.exit(main(sys.argv[1:], __file__))
