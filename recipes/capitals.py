"""A word with a capital, for a pretrained model: `trimtab train recipes/capitals.py model=smollm2`.

The prompt's four examples disagree: three copy the word, one writes it with a capital. A small
model copies, greedily every word, and when sampled writes the capital once in twenty; only the
reward says which is right. No word that is held out is ever trained on.
"""

from __future__ import annotations

import random
import sys

from trimtab.trainer.completion import Completion
from trimtab.trainer.task import Item

EXAMPLES = "tiger -> tiger\nwater -> Water\nbread -> bread\nmovie -> movie\n"
NOUNS = """
apple arm baby bag ball bank barn basket beach bear bed bell belt bird boat body bone book bowl box
boy branch brick bridge brother bus butter camera camp car card castle cat chain chair cheese
chicken church city clock cloud coat coffee corn cow cup dance doctor dog door dress drum duck dust
ear earth egg engine eye face farm father field finger fire fish flag floor flower foot forest fork
fox friend frog fruit game garden gate girl glass gold grass guitar hair hammer hand hat head heart
hill home honey horse hospital hotel house ice island key king kitchen lake lamp leaf leg letter
library lion lip market milk mirror money monkey moon morning mother mountain mouse mouth music neck
nest night nurse ocean oil orange owl paint paper park piano picture pig plant plate pocket pond
potato queen rabbit rain rice ring river road robot roof room root rose salt sand school sea shadow
sheep ship shop silver sister sky snake snow soup spider spring star station stone storm street
sugar sun table teacher tooth tower town toy train tree uncle village wall watch wheel wind window
wing winter wolf wood wool
"""
words = NOUNS.split()
random.Random(0).shuffle(words)
items = [{"prompt": f"{EXAMPLES}{word} ->", "answer": word.capitalize()} for word in words]
held_out, prompts = items[:60], items[60:]
stop = ["\n"]
defaults = {
    "steps": 12,
    "groups_per_batch": 6,
    "group_size": 8,
    "learning_rate": 1e-4,
    "lora_rank": 16,
    "max_tokens": 4,
    "eval_every": 2,
}


def reward(completion: Completion, item: Item) -> float:
    """reward(" Stone", {"answer": "Stone"}) = 1"""
    return float(completion.strip() == item["answer"] and not completion.truncated)


if __name__ == "__main__":
    from trimtab.trainer.cli import main

    sys.exit(main(sys.argv[1:], __file__))
