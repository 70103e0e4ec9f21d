"""Stop strings: alone against the whole decoded text, in the engine, in rerolls and in a run."""

from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from alula import Engine, Evict, Sampling, Sparsity
from alula.engine.stop_strings import StopStrings, answer_text, resolve_stops
from alula.errors import SettingError
from alula.models.load import load_model
from alula.rollouts.local_rollouts import LocalRollouts
from alula.trainer.reroll import continuations, spliced

LETTERS = "abcdefghijklmnop"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def pair_tokenizer(size: int = 128) -> PreTrainedTokenizerFast:
    """Token i is two letters, so a string of two letters may lie across two tokens."""
    words = [first + second for first in LETTERS for second in LETTERS][:size]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def shortest(tokenizer, tokens: list[int], stops: tuple[str, ...], least: int = 0) -> int | None:
    """The shortest answer whose text, after its first `least` tokens, contains a stop string."""
    for count in range(1, len(tokens) + 1):
        if any(stop in tokenizer.decode(tokens[least:count]) for stop in stops):
            return count
    return None


@pytest.mark.parametrize("chunk", [1, 3, 50])
@pytest.mark.parametrize(
    ("text", "stops", "before"),
    [
        ("One.\n\nTwo.\n\n", ("\n\n",), "One."),
        ("def f():\n  pass\nclass A", ("\nclass", "\ndef"), "def f():\n  pass"),
        ("un café, s'il vous plaît", ("é,",), "un caf"),
        ("good 🙂🙃 bad", ("🙃",), "good 🙂"),
        ("```python\nx\n```\nmore", ("\n```",), "```python\nx"),
        ("nothing of the kind", ("END",), None),
        ("half of the string: EN", ("END",), None),
    ],
)
def test_the_answer_ends_with_the_token_that_completes_a_string(text, stops, before, chunk):
    tokenizer = byte_tokenizer()
    tokens, strings = tokenizer(text)["input_ids"], StopStrings(stops, tokenizer)
    end = None
    for start in range(0, len(tokens), chunk):
        found = strings.end(tokens[:start], tokens[start : start + chunk])
        if found is not None:
            end = start + found
            break
    assert end == shortest(tokenizer, tokens, stops)
    if before is not None:
        assert answer_text(tokens[:end], "stop", strings, tokenizer) == before


class CountingTokenizer:
    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.longest = tokenizer, 0

    def decode(self, tokens, **options) -> str:
        self.longest = max(self.longest, len(tokens))
        return self.tokenizer.decode(tokens, **options)


def test_a_long_answer_is_searched_at_its_end_only():
    tokens = byte_tokenizer()("x" * 1000 + "STOP")["input_ids"]
    counting = CountingTokenizer(byte_tokenizer())
    ends = [StopStrings(("STOP",), counting).end(tokens[:i], tokens[i : i + 1]) for i in range(len(tokens))]
    assert ends == [None] * 1003 + [1]
    assert counting.longest < 20


def test_special_tokens_are_stop_ids():
    tokenizer = byte_tokenizer()
    ids, strings = resolve_stops(["<|end|>", "###", 7], tokenizer)
    assert ids == {7, tokenizer.convert_tokens_to_ids("<|end|>")}
    assert strings is not None
    assert strings.strings == ("###",)
    with pytest.raises(SettingError, match="no tokenizer"):
        resolve_stops(["###"], None)
    with pytest.raises(SettingError, match="empty text"):
        Sampling(stop=("",))
    assert Sampling(stop="ab").stop == ("ab",)


@pytest.fixture(scope="module")
def engine() -> Engine:
    loaded = replace(load_model("shape:tiny-llama"), tokenizer=pair_tokenizer(), eos_ids=())
    return Engine(loaded, page=4, kv_memory="4MiB", max_rows=8, lookahead=3)


@pytest.mark.parametrize("policy", [None, Sparsity(Evict("snapkv", 12, buffer=4, window=2, sinks=2))])
@pytest.mark.parametrize("least", [0, 9])
def test_the_engine_stops_at_strings(engine, policy, least):
    stops = ("fh", "ap", "kck")  # two letters often lie across two tokens
    sampling = Sampling(n=8, max_new_tokens=30, min_new_tokens=least)
    free = engine.generate([[1, 2, 3], [40] * 9], replace(sampling, min_new_tokens=0), policy)
    stopped = engine.generate([[1, 2, 3], [40] * 9], replace(sampling, stop=stops), policy)
    ended = 0
    for whole, short in zip(free, stopped):
        end = shortest(engine.tokenizer, whole.token_ids, stops, least)
        assert short.token_ids == whole.token_ids[:end]
        assert short.finish == ("length" if end is None else "stop")
        assert len(short.logprobs) == len(short)
        if end is not None:
            ended += 1
            start = len(engine.tokenizer.decode(whole.token_ids[: end - 1])) - 2
            assert short.text == whole.text[: min(i for s in stops if (i := whole.text.find(s, max(0, start))) >= 0)]
    assert 2 < ended < 16
    assert engine.pool.in_use == 0


def test_a_reroll_stops_at_a_string_that_began_before_it(engine):
    [rollout] = engine.generate([[1, 2, 3]], Sampling(max_new_tokens=12))
    [suffix] = LocalRollouts(engine).generate(continuations({0: (rollout, 4)}, seed=0))
    across = engine.tokenizer.decode(rollout.token_ids[3:4]) + engine.tokenizer.decode(suffix.token_ids[:1])[0]
    stopping = replace(rollout, sampling=replace(rollout.sampling, stop=(across,)))
    assert across not in engine.tokenizer.decode(rollout.token_ids[:4]), "complete before: use another prompt here"
    [short] = LocalRollouts(engine).generate(continuations({0: (stopping, 4)}, seed=0))
    assert (len(short), short.finish) == (1, "stop")
    whole = spliced(stopping, 4, short, engine.tokenizer)
    assert whole.text == engine.tokenizer.decode(rollout.token_ids[:4])[:-2]
