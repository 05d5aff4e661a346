"""Stop tokens and stop strings on a tokenizer whose pieces cut words, characters and strings."""

import pytest
from transformers import AutoTokenizer

from trimtab import tiny
from trimtab.engine.stops import Stops, decoder
from trimtab.types import SamplingParams

EOS, START, END = 0, 1, 2


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny.build(tmp_path_factory.mktemp("m")))


@pytest.fixture(scope="module")
def byte_of(words):
    """One byte -> the token that is that byte."""
    names = words.backend_tokenizer.get_vocab()
    alphabet = {}
    for byte in range(128):
        encoded = words(chr(byte), add_special_tokens=False).input_ids
        alphabet[byte] = encoded[0]
    for character in ("é", "€", "🦊"):
        pieces = words(character, add_special_tokens=False).input_ids
        for byte, piece in zip(character.encode(), pieces, strict=True):
            alphabet[byte] = piece
    assert len(names) == 320
    return alphabet


def stops(words, prompt=(), **params):
    return Stops.of(SamplingParams(**params), (EOS,), list(prompt), decoder(words))


def ends_at(rule, generated):
    """How many tokens are kept, or None if the rule never fires."""
    for n in range(1, len(generated) + 1):
        if rule.end(generated[:n]):
            return n
    return None


def test_eos_stops_beside_explicit_stops_but_not_with_the_empty_list(words):
    assert ends_at(stops(words), [9, EOS]) == 2
    assert ends_at(stops(words, stop_token_ids=(7,)), [9, EOS]) == 2
    assert ends_at(stops(words, stop_token_ids=(7,)), [9, 7, EOS]) == 2
    assert ends_at(stops(words, stop_strings=("zz",)), [9, EOS]) == 2
    assert ends_at(stops(words, ignore_eos=True), [9, EOS, EOS]) is None


def test_a_string_across_tokens_or_inside_one_keeps_the_completing_token(words, byte_of):
    a, b, c = (byte_of[ord(x)] for x in "abc")
    rule = stops(words, stop_strings=("ab",))
    assert ends_at(rule, [c, a, b, c]) == 3
    the = words(" the", add_special_tokens=False).input_ids
    assert len(the) == 1  # "he" lies inside it
    assert ends_at(stops(words, stop_strings=("he",)), [c, *the, c]) == 2
    assert ends_at(stops(words, stop_strings=("c t",)), [c, *the, c]) == 2
    assert ends_at(stops(words, stop_strings=("ec",)), [c, *the, c]) == 3


def test_a_special_token_is_text_like_any_other(words, byte_of):
    assert ends_at(stops(words, stop_strings=("<|im_end|>",)), [9, START, END, 9]) == 3
    assert ends_at(stops(words, stop_strings=("|>",)), [9, START, END]) == 2
    both = [byte_of[ord("a")], END]
    assert ends_at(stops(words, stop_strings=("a<|im",)), both) == 2


def test_characters_of_several_tokens_match_when_whole(words, byte_of):
    fox = [byte_of[x] for x in "🦊".encode()]
    euro = [byte_of[x] for x in "€".encode()]
    a = byte_of[ord("a")]
    assert ends_at(stops(words, stop_strings=("🦊",)), [a, *fox, a]) == 5
    assert ends_at(stops(words, stop_strings=("€🦊a",)), [a, *euro, *fox, a, a]) == 9
    # text before an unfinished character counts already
    assert ends_at(stops(words, stop_strings=("a",)), [fox[0], a, fox[0]]) == 2
    assert ends_at(stops(words, stop_strings=("\ufffd🦊",)), [*fox, *fox]) is None


def test_the_prompt_is_not_searched_but_its_last_character_may_be_finished(words, byte_of):
    a, b = byte_of[ord("a")], byte_of[ord("b")]
    fox = [byte_of[x] for x in "🦊".encode()]
    assert ends_at(stops(words, [a, b], stop_strings=("ab",)), [a, a, b]) == 3
    assert ends_at(stops(words, [a], stop_strings=("ab",)), [b, a]) is None
    assert ends_at(stops(words, [a, *fox[:2]], stop_strings=("🦊",)), fox[2:]) == 2


def test_a_leading_space_survives_where_a_decoder_drops_the_first():
    """A sentencepiece-like decoder strips the space of the first piece it is given."""

    def decode(ids):
        return "".join(chr(i) for i in ids).removeprefix(" ")

    rule = Stops.of(SamplingParams(stop_strings=(" b",)), (), [ord("x")], decode)
    assert ends_at(rule, [ord(" "), ord("b")]) == 2
    long = [ord(x) for x in "some text and then a b"]
    assert ends_at(rule, long) == len(long)


def test_only_the_last_tokens_are_decoded(words):
    seen = []
    plain = decoder(words)

    def decode(ids):
        seen.append(len(ids))
        return plain(ids)

    rule = Stops.of(SamplingParams(stop_strings=("zzz",)), (), [9] * 50, decode)
    generated = [9] * 400
    assert not rule.end(generated) and max(seen) <= 11
