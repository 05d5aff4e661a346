"""Small data sets of the form that recipes load from a hub, in folders of the same names.

`datasets.load_dataset("org/name")` takes a folder of that name below the working directory before
it asks a hub, so recipes run in `root` find these. The form is theirs, the content is made here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

Row = dict[str, object]


def write_all(root: Path) -> Path:
    """Every data set below `root`, and the sentences that prompt distillation reads there."""
    _write(root / "openai/gsm8k", {"train": _answers(64), "test": _answers(2)}, config="main")
    _write(root / "HuggingFaceH4/no_robots", {"train": _chats(64), "test": _chats(4)})
    _write(root / "Anthropic/hh-rlhf", {"train": _preferences(64), "test": _preferences(2)})
    _write(root / "zwhe99/DeepMath-103K", {"train": _questions(32)})
    _write(root / "allenai/tulu-3-sft-mixture", {"train": _chats(32)})
    _write(root / "open-thoughts/OpenThoughts3-1.2M", {"train": _thoughts(32)})
    sentences = root / "tinker_cookbook/example_data/multilingual.txt"
    sentences.parent.mkdir(parents=True, exist_ok=True)
    sentences.write_text("Good morning.\nGuten Morgen.\n")
    return root


def conversations(file: Path, count: int = 64) -> Path:
    """A file of conversations, one a line, as `FromConversationFileBuilder` reads it."""
    file.write_text("".join(json.dumps({"messages": _chat(i)}) + "\n" for i in range(count)))
    return file


def _write(folder: Path, splits: dict[str, Iterator[Row]], config: str = "default") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n"
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        card += f"  - split: {split}\n    path: {split}.jsonl\n"
    (folder / "README.md").write_text(card + "---\n")


def _answers(count: int) -> Iterator[Row]:
    """A question that a small model answers right now and then, in the form asked for."""
    for _ in range(count):
        question = "The answer is \\boxed{3}. What is the answer?"
        yield {"question": question, "answer": "Three.\n#### 3"}


def _chat(i: int) -> list[Row]:
    a, b = 1 + i % 4, 1 + i // 4 % 4
    return [
        {"role": "user", "content": f"How many are {a} and {b}?"},
        {"role": "assistant", "content": f"They are {a + b}, counted on the fingers."},
    ]


def _chats(count: int) -> Iterator[Row]:
    for i in range(count):
        yield {"prompt": f"{i}", "prompt_id": f"{i}", "messages": _chat(i), "category": "Open QA"}


def _thoughts(count: int) -> Iterator[Row]:
    for i in range(count):
        asked, said = (str(turn["content"]) for turn in _chat(i))
        yield {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]}


def _preferences(count: int) -> Iterator[Row]:
    for i in range(count):
        asked = f"\n\nHuman: Tell me of the number {i}.\n\nAssistant: "
        yield {"chosen": asked + "Gladly: it is a number.", "rejected": asked + "No, go away now!"}


def _questions(count: int) -> Iterator[Row]:
    for i in range(count):
        yield {"question": f"What is {i} + {i + 1}?", "final_answer": str(2 * i + 1)}
