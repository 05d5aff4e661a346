"""TRL's side of benchmarks.rl_step, run by its own Python: RLOOTrainer's whole step, as it is.

LoRA of rank 32 on every linear, float32, no reference model (beta 0), a reward that costs nothing,
every completion of full length. One line of input lets one step run: the trainer waits for it where
the step begins.
"""

import json
import random
import string
import sys
import tempfile
import warnings

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import RLOOConfig, RLOOTrainer

warnings.simplefilter("ignore")


class Turns(TrainerCallback):
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def on_train_begin(self, args, state, control, **kwargs):
        say("ready")

    def on_step_begin(self, args, state, control, **kwargs):
        if not sys.stdin.readline():
            sys.exit()

    def on_step_end(self, args, state, control, **kwargs):
        say(str(self.tokens))


def main() -> None:
    setup = json.loads(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(setup["model"])
    model = AutoModelForCausalLM.from_pretrained(setup["model"], dtype=torch.float32)
    rows = setup["prompts"] * setup["samples"]
    with tempfile.TemporaryDirectory() as folder:
        config = RLOOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=1,
            num_generations=setup["samples"],
            max_completion_length=setup["new"],
            generation_kwargs={"min_new_tokens": setup["new"]},
            beta=0.0,
            learning_rate=1e-5,
            max_steps=100_000,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        texts = [text_of(tokenizer, setup["prompt"]) for _ in range(40 * setup["prompts"])]
        RLOOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [random.random() for _ in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=32, lora_alpha=32, target_modules="all-linear"),
            callbacks=[Turns(rows * setup["new"])],
        ).train()


def text_of(tokenizer, tokens: int) -> str:
    """A random text of exactly so many tokens."""
    while True:
        words = ("".join(random.choices(string.ascii_lowercase, k=5)) for _ in range(2 * tokens))
        ids = tokenizer(" ".join(words), add_special_tokens=False).input_ids[:tokens]
        text = tokenizer.decode(ids)
        if len(tokenizer(text).input_ids) == tokens:
            return text


def say(what: str) -> None:
    print(f"peer:{what}", flush=True)


if __name__ == "__main__":
    main()
