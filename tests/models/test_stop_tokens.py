"""Tokens that end an answer: the end of a chat turn of a base model, too."""

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from alula import Engine, Sampling
from alula.models.load import load_model
from alula.models.stop_tokens import end_of_turn

QWEN = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA3 = (
    "{%- for message in messages %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + "
    "message.content | trim + '<|eot_id|>' }}{%- endfor %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token per byte, and special tokens of Qwen2.5 and Llama 3. Like a base model's, its end is <|endoftext|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=template, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (QWEN, "<|im_end|>"),
        (LLAMA3, "<|eot_id|>"),
        (None, None),
        ("{%- for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{%- endfor %}", None),
        ("{{ raise_exception('only tools') }}", None),
    ],
    ids=["qwen", "llama-3", "no template", "plain text", "a template that raises"],
)
def test_the_end_of_a_turn_is_read_from_the_chat_template(template, end):
    found = tokenizer(template)
    assert end_of_turn(found) == (None if end is None else found.convert_tokens_to_ids(end))


def test_a_base_model_with_a_chat_template_stops_at_the_end_of_its_turn(tmp_path):
    """As Qwen2.5-1.5B: configuration and tokenizer name <|endoftext|> only."""
    own = tokenizer(QWEN)
    config = Qwen2Config(
        vocab_size=len(own), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=own.eos_token_id,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    end = own.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():  # every token is equally likely
        model.model.norm.weight.fill_(0.0)
        model.lm_head.weight.fill_(0.0)
    model.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.eos_ids == (own.eos_token_id, end)
    engine = Engine(loaded, page=4, kv_memory="1MiB")
    rollouts = engine.generate([[5, 6, 7]] * 2, Sampling(n=40, max_new_tokens=200))
    ends = {rollout.token_ids[-1] for rollout in rollouts if rollout.finish == "stop"}
    assert ends == {own.eos_token_id, end}
    assert all(set(rollout.token_ids[:-1]).isdisjoint(ends) for rollout in rollouts)
