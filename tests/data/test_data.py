"""Data: sources, benchmark formats, chat templates, resumable streams, generated tasks."""

import inspect
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from alula.data import Dataset, Example, PromptStream, load, prepare
from alula.data.load import settings_per_source
from alula.data.tasks import TASKS, build
from alula.data.tasks.tokenizer import supervised_ids, task_tokenizer
from alula.errors import SettingError


def test_rows_without_an_answer_are_dropped_and_counted(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": str(i), "answer": a}) for i, a in enumerate(["1", "", None, "$$"])))
    data = load(path)
    assert [example.prompt for example in data] == ["0"]
    assert data.dropped == {"no answer": 3}
    assert data.name == "mine"
    assert len(load(str(path), answer="")) == 4


def test_parquet_templates_and_nested_fields(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"q": {"text": f"Q{i}"}, "hint": "\\boxed{}", "target": [i, i + 1]} for i in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    data = load(str(tmp_path / "train.parquet"), prompt="{q.text}: {hint} {} {1}?", answer="{target}", size=3)
    assert [example.prompt for example in data] == [f"Q{i}: \\boxed{{}} {{}} {{1}}?" for i in range(3)]
    assert data[2].answer == [2, 3]
    folder = load(str(tmp_path), prompt="{q.text}", answer="{target}")
    assert len(folder) == 5
    with pytest.raises(SettingError, match=r'hint, q, target.*data\.answer="{target}"'):
        load(str(tmp_path), prompt="{q.text}", answer="{targt}")
    with pytest.raises(SettingError, match=r"'q\.txt' .*known: text.* data\.prompt=\"{q\.text}\""):
        load(str(tmp_path), prompt="{q.txt}", answer="{target}")


def test_hugging_face_datasets_from_disk(tmp_path):
    import datasets

    turns = [{"role": "user", "content": "hi"}]
    rows = datasets.Dataset.from_list([{"prompt": turns, "answer": "x"}] * 3)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "many")
    assert load(str(tmp_path / "one"))[0].prompt == turns
    assert len(load(str(tmp_path / "many"), split="test")) == 1
    with pytest.raises(SettingError, match="did you mean 'test'"):
        load(str(tmp_path / "many"), split="tst")


def test_reasoning_gym_is_reproducible():
    pytest.importorskip("reasoning_gym")
    options = {"min_terms": 3, "max_terms": 3}
    first = load("reasoning-gym:chain_sum", size=5, seed=7, options=options)
    assert first.examples == load("reasoning-gym:chain_sum", size=5, seed=7, options=options).examples
    assert first.examples != load("reasoning-gym:chain_sum", size=5, seed=8, options=options).examples
    assert all(example.fields["metadata"]["num_terms"] == 3 for example in first)


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("gsm8", {}, "did you mean 'gsm8k'"),
        ("nothing.jsonl", {}, "'nothing.jsonl'"),
        ("gsm8k", {"data_dir": "/nowhere"}, "'gsm8k'"),
        ("task:pointr", {}, "did you mean 'pointer'"),
        ("task:pointer", {"options": {"symbol": 3}}, "did you mean 'symbols'"),
        ("task:pointer", {"options": {"symbols": 1}}, "symbols=1"),
        ("task:pointer", {"size": 0}, "size=0"),
        ("nothing.jsonl", {"options": {"symbols": 3}}, "'nothing.jsonl'"),
        ("no/such/folder", {}, "'no/such/folder'"),
        ("./nothing", {}, "'./nothing'"),
        ("reasoning-gym:chain_sun", {}, "did you mean 'chain_sum'"),
        ("reasoning-gym:chain_sum", {"options": {"terms": 3}}, "terms"),
    ],
)
def test_invalid_settings_raise(source, settings, message):
    if source.startswith("reasoning-gym"):
        pytest.importorskip("reasoning_gym")
    with pytest.raises(SettingError, match=message):
        load(source, **settings)


@pytest.mark.parametrize("name", ["split", "data_dir", "prompt", "answer", "answer_form"])
def test_settings_that_a_source_does_not_take_raise(tmp_path, name):
    with pytest.raises(SettingError, match=rf"eval\.data\.{name}=plain: .*generated .* for task:pointer"):
        load("task:pointer", **{name: "plain"}, section="eval.data")
    assert len(load("task:pointer", answer="", size=3)) == 3, "commands that grade nothing ask for no answers"
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "b", "plain": "c"}\n')
    if name in ("split", "data_dir"):
        with pytest.raises(SettingError, match=rf"data\.{name}=plain: a single file .* for {path}"):
            load(str(path), **{name: "plain"})
    else:
        assert len(load(str(path), **{name: "plain"})) == 1


def test_broken_json_names_the_line(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n\n{"prompt": \n')
    with pytest.raises(SettingError, match=r"line 3, column \d+: not JSON \([A-Z][^:]*\); fix"):
        load(str(path))


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000])
def test_json_beyond_the_limits_of_python_names_the_line(tmp_path, value):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": ' + value + "}")
    with pytest.raises(SettingError, match="line 2"):
        load(str(path))


@pytest.mark.parametrize("name", ["bad.parquet", "saved/dataset_dict.json", "saved/state.json"])
def test_files_that_are_not_complete_are_named(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    source = path if path.suffix == ".parquet" else path.parent
    with pytest.raises(SettingError, match=source.name):
        load(str(source))


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}', encoding="utf-8-sig")
    assert load(str(path))[0].prompt == "a"


def test_bytes_that_are_not_utf8_name_the_line(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(
        '{"prompt": "a", "answer": "ü\u2028"}\n'.encode() + '{"prompt": "ü", "answer": "b"}\n'.encode("latin1")
    )
    with pytest.raises(SettingError, match=r"latin\.jsonl, line 2: .*UTF-8"):
        load(str(path))
    path.write_bytes(path.read_bytes().splitlines()[0])
    assert load(str(path))[0].answer == "ü\u2028", "U+2028 inside a string does not end the line"


def test_rows_that_do_not_fit_name_the_file_and_give_a_hint(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n')
    with pytest.raises(SettingError, match=rf"data {path}: .*'prompt'.*known: answer, question") as error:
        load(str(path))
    assert 'data.prompt="{question}"' in str(error.value)
    assert "--prompt" in str(error.value)
    path.write_text('{"prompt": "a", "answer": "b"}\n' * 4 + '{"prompt": "c"}\n')
    with pytest.raises(SettingError, match=rf"data {path}, row 5: .*'answer'"):
        load(str(path))
    path.write_text("")
    with pytest.raises(SettingError, match=rf"data {path}: .*read 0"):
        load(str(path))
    path.write_text('{"prompt": "a", "answer": ""}\n')
    with pytest.raises(SettingError, match=rf"data {path}: .*read 1.*data\.answer"):
        load(str(path))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt None is neither text nor"),
        (5, "prompt 5 is neither text nor"),
        ([], r"prompt \[\] is neither text nor"),
        (["a"], r"prompt \['a'\] is neither text nor"),
        ("a \ud83d b", r"prompt 'a \\ud83d b' has half of a surrogate pair"),
        ([{"role": "user", "content": "\ude00"}], "half of a surrogate pair"),
    ],
)
def test_prompts_that_are_neither_text_nor_messages_name_the_row(tmp_path, prompt, message):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": prompt, "answer": "b"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SettingError, match=rf"eval\.data {path}, row 2: .*{message}.*eval\.data\.prompt"):
        load(str(path), section="eval.data")
    path.write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[1] | {"answer": None}))
    assert load(str(path)).dropped == {"no answer": 1}


def test_a_null_in_a_template_is_not_the_word_none(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "a", "hint": "b", "answer": "#### c"}\n{"q": "a", "hint": null, "answer": "d"}\n')
    with pytest.raises(SettingError, match=f"data {path}, row 2: field 'hint' of the prompt template is null; correct"):
        load(path, prompt="{q} {hint}")
    path.write_text('{"prompt": "a", "answer": "#### c"}\n{"prompt": "a", "answer": null}\n')
    for template in ({"answer_form": "####"}, {"answer": "the {answer}"}):
        assert load(path, **template).dropped == {"no answer": 1}


def test_chat_messages_in_a_text_template_are_not_the_text_of_a_list(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}\n')
    with pytest.raises(SettingError, match=r"row 1: field 'prompt' of the prompt template is chat messages, .* alone"):
        load(path, prompt="{prompt} Think.")
    path.write_text('{"prompt": "Which?", "choices": ["a", "b"], "answer": "b"}\n')
    assert load(path, prompt="{prompt} {choices}")[0].prompt == "Which? ['a', 'b']"


# --- prompts ----------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} {{ m['role'] }} : {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} assistant :{% endif %}{% if short %} short{% endif %}"
)


@pytest.fixture
def tokenizer():
    tokenizer = task_tokenizer(build("pointer"))
    tokenizer.add_tokens(["user", "assistant", "system", "short"])
    return tokenizer


def test_plain_prompts_get_the_tokenizers_special_tokens(tokenizer):
    (example,) = prepare(Dataset((Example("a b ;"),)), tokenizer)
    assert list(example.prompt_ids) == tokenizer.convert_tokens_to_ids(["<bos>", "a", "b", ";"])


def test_chat_template_with_system_and_options_and_one_bos(tokenizer):
    tokenizer.chat_template = TEMPLATE
    data = Dataset((Example("a b"), Example([{"role": "user", "content": "c"}])))
    words = [
        tokenizer.convert_ids_to_tokens(list(example.prompt_ids))
        for example in prepare(data, tokenizer, system="d", template_options={"short": True})
    ]
    assert words[0] == ["<bos>", "system", ":", "d", "user", ":", "a", "b", "assistant", ":", "short"]
    assert words[1] == ["<bos>", "system", ":", "d", "user", ":", "c", "assistant", ":", "short"]
    (raw,) = prepare(Dataset((Example("a b"),)), tokenizer, chat=False)
    assert tokenizer.convert_ids_to_tokens(list(raw.prompt_ids)) == ["<bos>", "a", "b"]


def test_long_prompts_are_dropped_and_counted(tokenizer):
    data = Dataset(tuple(Example("a " * n) for n in (1, 5, 9, 3)), dropped={"no answer": 2})
    kept = prepare(data, tokenizer, max_prompt_tokens=6)
    assert [len(example.prompt_ids) for example in kept] == [2, 6, 4]
    assert kept.dropped == {"no answer": 2, "prompt over 6 tokens": 1}
    with pytest.raises(SettingError, match="max_prompt_tokens=1"):
        prepare(data, tokenizer, max_prompt_tokens=1)


@pytest.mark.parametrize("bos", [False, True])
def test_empty_prompts_are_dropped_and_counted(tokenizer, bos):
    if not bos:
        tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    data = Dataset(tuple(Example(prompt) for prompt in ("a b", "", "c d e", " ")))
    kept = prepare(data, tokenizer, max_prompt_tokens=2 + bos)
    assert [example.prompt for example in kept] == ["a b"]
    assert kept.dropped == {"empty prompt": 2, f"prompt over {2 + bos} tokens": 1}
    with pytest.raises(SettingError, match=r"all 1 prompts are empty.*data\.prompt"):
        prepare(Dataset((Example(""),)), tokenizer)


def test_a_prompt_that_the_chat_template_rejects_is_named(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ ' ' + m['content'] }}{% endfor %}"
    data = Dataset((Example("a"), Example([{"role": "user", "content": [{"type": "text", "text": "odd"}]}])), "mine")
    with pytest.raises(SettingError, match=r"data mine, prompt .*odd"):
        prepare(data, tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no system') if messages[0]['role'] == 'system' }}"
    with pytest.raises(SettingError, match=r"data mine, prompt 'a'.*no system"):
        prepare(Dataset((Example("a"),), "mine"), tokenizer, system="short")
    with pytest.raises(SettingError, match=r"template_options\.add_generation_prompt"):
        prepare(data, tokenizer, template_options={"add_generation_prompt": False})
    with pytest.raises(SettingError, match=r"template_options\.messages"):
        prepare(data, tokenizer, template_options={"messages": []})


def test_chat_without_a_template_raises(tokenizer):
    data = Dataset((Example([{"role": "user", "content": "a"}]),))
    with pytest.raises(SettingError, match="no chat template"):
        prepare(data, tokenizer, chat=True)
    with pytest.raises(SettingError, match="chat messages"):
        prepare(data, tokenizer)
    with pytest.raises(SettingError, match="system"):
        prepare(data, tokenizer, system="be brief")


def test_symbols_unknown_to_the_tokenizer_raise():
    tokenizer = task_tokenizer(build("successor", symbols=4))
    assert len(prepare(load("task:successor", options={"symbols": 4}), tokenizer)) == 1000
    message = r"data task:successor.*symbol '[e-h]'.*data.options"
    with pytest.raises(SettingError, match=message):
        prepare(load("task:successor"), tokenizer)
    with pytest.raises(SettingError, match=message):
        prepare(load("task:successor").split(50)[1], tokenizer)
    tokenizer.chat_template = TEMPLATE
    assert len(prepare(load("task:successor", options={"symbols": 4}), tokenizer)) == 1000, (
        "words of the template are allowed"
    )
    with pytest.raises(SettingError, match=message):
        prepare(load("task:successor"), tokenizer)
    (example,) = prepare(Dataset((Example("a z"),)), tokenizer, chat=False)
    assert example.prompt_ids[-1] == tokenizer.unk_token_id, "other data may hold unknown symbols"


# --- order ------------------------------------------------------------------------------------------------------


def numbered(size: int) -> Dataset:
    return Dataset(tuple(Example(str(i), i) for i in range(size)))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 12),
    draws=st.lists(st.integers(0, 15), max_size=12),
    cut=st.integers(0, 12),
    seed=st.integers(0, 5),
)
def test_a_stream_resumes_anywhere_and_visits_all_once_an_epoch(size, draws, cut, seed):
    data = numbered(size)
    uninterrupted = PromptStream(data, seed)
    everything = [example for count in draws for example in uninterrupted.next(count)]

    first = PromptStream(data, seed)
    before = [example for count in draws[:cut] for example in first.next(count)]
    state = json.loads(json.dumps(first.state_dict()))
    second = PromptStream(numbered(size), seed)
    second.load_state_dict(state)
    after = [example for count in draws[cut:] for example in second.next(count)]
    assert before + after == everything
    assert second.seen == uninterrupted.seen == len(everything) == sum(draws)

    for start in range(0, len(everything) - size + 1, size):
        assert Counter(e.answer for e in everything[start : start + size]) == Counter(range(size))


def test_every_epoch_and_seed_has_its_own_order():
    stream = PromptStream(numbered(50), seed=1)
    epochs = [tuple(e.answer for e in stream.next(50)) for _ in range(3)]
    other = tuple(e.answer for e in PromptStream(numbered(50), seed=2).next(50))
    assert len({*epochs, other, tuple(range(50))}) == 5
    # The order itself is part of a checkpoint's meaning: it must not change with a Python or library version.
    assert PromptStream(numbered(8), seed=0).next(8) == [numbered(8)[i] for i in (0, 3, 7, 4, 1, 5, 2, 6)]


def test_a_stream_rejects_other_data_and_another_seed():
    state = PromptStream(numbered(5), seed=1).state_dict()
    with pytest.raises(SettingError, match="training data"):
        PromptStream(numbered(6), seed=1).load_state_dict(state)
    with pytest.raises(SettingError, match="seed=2"):
        PromptStream(numbered(5), seed=2).load_state_dict(state)


def test_split_has_no_overlap_and_loses_nothing():
    training, held_out = numbered(20).split(6, seed=3)
    assert len(training) == 14
    assert sorted(e.answer for e in [*training, *held_out]) == list(range(20))
    assert numbered(20).split(6, seed=3)[1].examples == held_out.examples
    assert numbered(20).split(6, seed=4)[1].examples != held_out.examples
    with pytest.raises(SettingError, match="held_out=20"):
        numbered(20).split(20)


# --- generated tasks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TASKS))
def test_tasks_verify_their_traces_and_guesses_are_right_by_chance(name):
    task = build(name)
    data = task.dataset(600, seed=1)
    assert data.examples == task.dataset(600, seed=1).examples
    assert data.examples[:50] == task.dataset(50, seed=1).examples
    assert data.examples != task.dataset(600, seed=2).examples
    traces = [(e.fields["trace"], e.record()) for e in data]
    assert all(task.score(trace, record) == (not trace.endswith("answer none")) for trace, record in traces)
    guessed = sum(task.score(e.fields["shortcut"], e.record()) == 1 for e in data) / len(data)
    assert guessed == pytest.approx(task.chance, abs=4 * (task.chance / len(data)) ** 0.5)
    assert task.score("", data[0].record()) == 0


@pytest.mark.parametrize("name", sorted(TASKS))
@pytest.mark.parametrize("value", ["abc", 4.0, True, None, [4]])
def test_options_of_tasks_are_whole_numbers(name, value):
    for option in inspect.signature(TASKS[name]).parameters:
        with pytest.raises(SettingError) as error:
            build(name, **{option: value})
        assert f"task {name}: {option}={value!r}" in str(error.value)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_task_tokenizer_is_lossless_and_survives_saving(tmp_path, name):
    task = build(name)
    tokenizer = task_tokenizer(task)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for example in task.dataset(20):
        for shortcut in (False, True):
            prompt, solution = supervised_ids(tokenizer, example, shortcut)
            assert (prompt, solution) == supervised_ids(loaded, example, shortcut)
            assert prompt[0] == tokenizer.bos_token_id
            assert solution[-1] == tokenizer.eos_token_id
            assert tokenizer.unk_token_id not in prompt + solution
            assert loaded.decode(prompt, skip_special_tokens=True) == example.prompt
            text = example.fields["shortcut" if shortcut else "trace"]
            assert loaded.decode(solution, skip_special_tokens=True) == text


def test_pointer_chains_against_a_hand_written_walk():
    task = build("pointer", symbols=20, min_hops=3, max_hops=200)
    for example in task.dataset(40, seed=5):
        pairs, question = example.prompt.split(" ; ")
        words = pairs.split()
        leads_to = {a.removesuffix(">"): b for a, b in zip(words[::2], words[1::2])}
        here, hops, _ = question.split()
        assert len(leads_to) == len(set(leads_to.values())) == 20
        for _ in range(int(hops)):
            here = leads_to[here]
        assert example.answer == here
        assert len(example.fields["trace"].split()) == 3 * int(hops) + 2
    record = example.record()
    assert task.score(example.fields["trace"] + " " + here, record) == 0  # nothing may follow the answer
    assert task.score(example.fields["trace"].rsplit(" ", 1)[0], record) == 0


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("2 + 3 = 5 ; 5 * 4 = 20", 1),
        ("3 * 4 = 12 ; 12 + 2 = 14 | 2 + 3 = 5 ; 4 * 5 = 20", 1),
        ("2 + 3 = 5 ; 5 * 4 = 20 | 3 * 4 = 12 ; 12 + 2 = 14", 0),
        ("4 * 5 = 20", 0),
        ("2 + 3 = 6 ; 6 * 4 = 20", 0),
        ("2 * 2 = 4 ; 4 * 5 = 20", 0),
        ("2 + 3 = 5 ; 5 * 4 =", 0),
        ("20", 0),
    ],
)
def test_countdown_verifier(completion, score):
    assert build("countdown").score(completion, {"prompt": "2 3 4 > 20 :", "answer": "20"}) == score


def test_settings_of_several_sources_go_to_those_that_take_them(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("{}")
    sources, settings = ["gsm8k", str(file), "task:pointer"], {"data_dir": "D", "prompt": "{q}", "options": {"a": 1}}
    assert settings_per_source(sources, settings) == [
        {"data_dir": "D", "prompt": "{q}"},
        {"prompt": "{q}"},
        {"options": {"a": 1}},
    ]
    assert settings_per_source([str(file), "task:pointer"], {"data_dir": "D"}) == [{"data_dir": "D"}] * 2, "they raise"


def test_rows_with_tests_need_no_answer(tmp_path):
    path = tmp_path / "code.jsonl"
    rows = [
        {"prompt": "one", "tests": [{"call": "f(1)", "expected": "1"}]},
        {"prompt": "two", "tests": [], "answer": "2"},
        {"prompt": "three", "tests": [{"check": "pass"}], "answer": ""},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load(str(path))
    assert [(example.prompt, example.answer) for example in data] == [("one", None), ("two", "2")]
    assert data.dropped == {"no answer": 1}, "an answer that is there and empty is a gap"
    path.write_text(json.dumps({"prompt": "one", "tests": []}) + "\n")
    with pytest.raises(SettingError, match="unknown field 'answer'"):
        load(str(path))
