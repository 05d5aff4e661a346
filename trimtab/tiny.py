"""Builds a tiny random causal language model and its tokenizer in a folder, in half a second.

Offline; for tests, benchmarks and the demo. The folder loads with `AutoModelForCausalLM` and
`AutoTokenizer` like any other. The same arguments give the same files. Knows nothing of the server
or the engine.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trimtab.errors import Invalid

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig

Architecture = Literal["llama", "qwen3", "gemma2", "gemma3"]

ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen3", "gemma2", "gemma3")

EOS, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
SPECIALS = (EOS, START, END)

CHARACTERS = string.digits + string.ascii_lowercase + " +-*/=<>()[].,:;?!|#\n"

# What the byte-level tokenizer learns its merges from: enough for common short English pieces.
CORPUS = (
    "the cat sat on the mat and the dog sat on the log. two and two make four; three and three "
    "make six. what is the sum of one and two? the answer is three. she sells sea shells on the "
    "sea shore. user: what is this? assistant: this is a small model that is made to be tested. "
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(
    folder: str | Path,
    *,
    architecture: Architecture = "llama",
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int | None = None,
    vocab_size: int | None = None,
    context: int = 512,
    sliding_window: int = 16,
    tied: bool | None = None,
    init_std: float = 0.08,
    seed: int = 0,
    tokenizer: Literal["bytes", "characters"] = "bytes",
    characters: str = CHARACTERS,
) -> Path:
    """Write config, float32 weights and tokenizer into `folder` and return it.

    `vocab_size` is the model's: by default 320 with `"bytes"` (byte-level BPE, so any text
    round-trips) and exactly the tokenizer's with `"characters"` (one token a character of
    `characters`, all else unknown). `sliding_window` matters to the Gemma shapes alone.
    The standard deviation 0.08 makes the random distributions visibly uneven at hidden 64.

        >>> folder = build("/tmp/tiny", architecture="qwen3")
        >>> AutoTokenizer.from_pretrained(folder).decode(ids)
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(folder)
    _check(architecture, hidden, heads, kv_heads)
    if tokenizer == "bytes":
        vocab_size = 320 if vocab_size is None else vocab_size
        words = byte_tokenizer(vocab_size)
    else:
        words = character_tokenizer(characters)
        vocab_size = words.get_vocab_size() if vocab_size is None else vocab_size
    if vocab_size < words.get_vocab_size():
        raise Invalid(
            f"vocab_size is {vocab_size}, but the tokenizer has {words.get_vocab_size()} tokens"
        )
    shape = dict(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate or 2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        initializer_range=init_std,
        bos_token_id=None,
        eos_token_id=words.token_to_id(EOS),
        pad_token_id=words.token_to_id(EOS),
    )
    if tied is not None:
        shape["tie_word_embeddings"] = tied
    config = _config(architecture, shape, sliding_window)
    # fork_rng: building a model must not move the caller's random stream.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        model.save_pretrained(folder)
    _save_tokenizer(words, folder, context, chat=tokenizer == "bytes")
    return folder


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars from transformers inside; as before outside."""
    from transformers.utils import logging as module

    logging: Any = module
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def byte_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """Byte-level BPE: three special tokens, the 256 bytes, and merges up to `vocab_size` or until
    the corpus is used up."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator([CORPUS], trainer)
    return words


def character_tokenizer(characters: str = CHARACTERS) -> Tokenizer:
    """One token a character: EOS is 0, unknown is 1, then `characters` in their order."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if len(set(characters)) != len(characters):
        raise Invalid(f"characters must differ from each other, found {characters!r}")
    vocabulary = {EOS: 0, UNKNOWN: 1} | {c: i + 2 for i, c in enumerate(characters)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    words.decoder = decoders.Fuse()
    words.add_special_tokens([EOS, UNKNOWN])
    return words


def _check(architecture: str, hidden: int, heads: int, kv_heads: int) -> None:
    if architecture not in ARCHITECTURES:
        raise Invalid(f"architecture is {architecture!r}; allowed are {', '.join(ARCHITECTURES)}")
    if hidden % heads or (hidden // heads) % 2:
        raise Invalid(f"hidden {hidden} must be an even multiple of heads {heads}")
    if heads % kv_heads:
        raise Invalid(f"heads {heads} must be a multiple of kv_heads {kv_heads}")


def _config(
    architecture: Architecture, shape: dict[str, Any], sliding_window: int
) -> PretrainedConfig:
    from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, Qwen3Config

    if architecture == "llama":
        return LlamaConfig(**shape)
    if architecture == "qwen3":
        return Qwen3Config(**shape)
    kinds = ("sliding_attention", "full_attention")
    layer_types = [kinds[i % 2] for i in range(shape["num_hidden_layers"])]
    gemma = Gemma2Config if architecture == "gemma2" else Gemma3TextConfig
    return gemma(
        **shape,
        sliding_window=sliding_window,
        layer_types=layer_types,
        query_pre_attn_scalar=shape["head_dim"],
    )


def _save_tokenizer(words: Tokenizer, folder: Path, context: int, *, chat: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast
    fast = make(
        tokenizer_object=words,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        **({} if chat else {"unk_token": UNKNOWN}),
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
