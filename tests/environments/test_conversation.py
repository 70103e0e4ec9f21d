"""What comes between turns: the template's own text, and never a sampled token again."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from alula.environments.conversation import Conversation, as_messages
from alula.errors import SettingError

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# As in Qwen3: what stands before </think> is left out of all turns but the last.
DROPS_THINKING = CHATML.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}"
)
# As in DeepSeek-R1: the generation prompt opens a thought that earlier turns do not show.
OPENS_THINKING = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
FORGETS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
QUESTION = [{"role": "user", "content": "one two"}]
REPLY = [{"role": "tool", "content": "three"}, {"role": "user", "content": "go on"}]


@pytest.fixture(scope="module")
def tokenizer():
    """Characters, and ChatML's special tokens."""
    characters = {chr(code): index for index, code in enumerate([10, *range(32, 127)])}
    backend = Tokenizer(models.WordLevel({**characters, "?": 200}, unk_token="?"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    built = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", unk_token="?")
    built.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|endoftext|>"]})
    return built


def conversation(tokenizer, template, **options):
    tokenizer.chat_template = template
    return Conversation(tokenizer, **options)


@pytest.mark.parametrize("system", [None, "be brief"])
def test_tokens_of_all_turns_equal_the_rendered_conversation(tokenizer, system):
    chat = conversation(tokenizer, CHATML, system=system)
    end = tokenizer.eos_token_id
    sampled = tokenizer("four", add_special_tokens=False)["input_ids"]
    ids = [*chat.prompt(QUESTION), *sampled, end, *chat.between(QUESTION, REPLY, end)]
    first = [{"role": "system", "content": system}] if system else []
    whole = [*first, *QUESTION, {"role": "assistant", "content": "four"}, *REPLY]
    rendered = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_a_turn_that_ended_otherwise_gets_the_templates_end(tokenizer):
    chat = conversation(tokenizer, CHATML)
    end, other = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")
    after_end = chat.between(QUESTION, REPLY, end)
    assert chat.between(QUESTION, REPLY, other) == [end, *after_end]
    assert tokenizer.decode(after_end).startswith("\n<|im_start|>tool\nthree<|im_end|>")
    assert tokenizer.decode(after_end).endswith("<|im_start|>assistant\n")


def test_a_message_may_say_anything(tokenizer):
    chat = conversation(tokenizer, CHATML)
    odd = [{"role": "tool", "content": "@@ALULA-TURN@@ @@"}]
    given = tokenizer.decode(chat.between(QUESTION, odd, tokenizer.eos_token_id))
    assert given.startswith("\n<|im_start|>tool\n@@ALULA-TURN@@ @@<|im_end|>")


def test_templates_that_rewrite_history_are_named(tokenizer):
    assert conversation(tokenizer, CHATML).rewrites_history() is None
    assert "thinking" in conversation(tokenizer, DROPS_THINKING).rewrites_history()
    assert "generation prompt" in conversation(tokenizer, OPENS_THINKING).rewrites_history()
    assert Conversation(tokenizer, chat=False).rewrites_history() is None


def test_a_template_without_assistants_raises(tokenizer):
    with pytest.raises(SettingError, match="leaves out the assistant"):
        conversation(tokenizer, FORGETS).between(QUESTION, REPLY, 5)


def test_without_a_template_messages_are_lines(tokenizer):
    chat = conversation(tokenizer, CHATML, chat=False)
    assert tokenizer.decode(chat.prompt([*QUESTION, *REPLY])) == "one two\nthree\ngo on"
    assert tokenizer.decode(chat.between(QUESTION, REPLY, 5)) == "\nthree\ngo on\n"


def test_what_an_environment_may_return():
    assert as_messages("text") == [{"role": "user", "content": "text"}]
    assert as_messages([{"role": "tool", "content": "3", "name": "sum"}]) == [
        {"role": "tool", "content": "3", "name": "sum"}
    ]
    for wrong in (5, None, [5], [{"role": "user"}], [{"role": "user", "content": 5}]):
        with pytest.raises(SettingError, match="instead of messages"):
            as_messages(wrong)
