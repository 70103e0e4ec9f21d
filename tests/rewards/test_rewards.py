"""Rewards: known answers in every benchmark's format, and graders that hang, raise, crash or have wrong names."""

import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from alula.data.answers import final_answer, last_boxed
from alula.errors import SettingError
from alula.rewards import Answers, Rewards, RewardTerm
from alula.rewards import format as answer_format
from alula.rewards.length import overlong_penalty, target_penalty
from alula.rewards.math_answer import build

grade = build()

RIGHT = [
    # (reference, completion), in the forms of the benchmarks' reference answers
    ("So 7 * 6 = <<7*6=42>>42 eggs.\n#### 42", "Each day 7, thus \\boxed{42}."),  # gsm8k, whole solution
    ("1,250", "#### 1250"),
    ("1250", "\\boxed{1{,}250}"),
    ("1250", "\\boxed{\\$1,250}"),
    ("42", "\\boxed{42 eggs}"),
    ("42", "\\boxed{42 \\text{ eggs}}"),
    ("42", "That makes 42 in all."),
    ("\\left( 5, \\frac{\\pi}{3} \\right)", "\\boxed{(5,\\pi/3)}"),  # math500
    ("\\dfrac{3}{8}", "\\boxed{0.375}"),
    ("3+2x", "\\boxed{2x + 3}"),
    ("\\begin{pmatrix} 1 \\\\ 4 \\end{pmatrix}", "\\boxed{\\begin{pmatrix}1\\\\4\\end{pmatrix}}"),
    ("\\text{(B)}", "\\boxed{B}"),
    ("\\$21,\\!500", "\\boxed{21500}"),
    ("$\\{x|-3\\leq x < 2\\}$", "\\boxed{[-3,2)}"),  # gaokao2023en
    ("$-2-\\sqrt{7}$", "\\boxed{-\\sqrt{7}-2}"),
    ("\\frac{7 \\cdot 2}{5}=\\boxed{2.8} \\mathrm{~cm}", "\\boxed{2.80 \\mathrm{~cm}}"),  # minerva_math, boxed solution
    ("3.2e21", "\\boxed{3.2 \\times 10^{21}}"),
    ("5e-11", "\\boxed{5\\cdot 10^{-11}}"),
    ("2.9e-19", "\\boxed{0.00000000000000000029}"),
    ("0.00012", "\\boxed{1.2\\times 10^{-4}}"),
    (["$2^{3000}$"], "\\boxed{2^{3000}}"),
    (["$2^{10}$"], "\\boxed{1024}"),  # olympiadbench, a list
    (["$(2,1), (4,3)$"], "\\boxed{(4,3),(2,1)}"),
    (["5", "-5"], "\\boxed{\\pm 5}"),
    ("071", "\\boxed{71}"),  # aime24
    (33.0, "\\boxed{33}"),  # amc23, svamp, mawps
    ("6", "\\boxed{6}"),  # asdiv
    ("42", "<think>maybe \\boxed{41}</think>No: \\boxed{42}"),
    ("42", "\\boxed{42} as asked within \\boxed{}."),
]
WRONG = [
    ("42", "\\boxed{43}"),
    ("42", "<think>\\boxed{42}</think> \\boxed{41}"),
    ("42", ""),
    ("42", "42 at first, then \\boxed{7}"),
    ("a+b+c", "\\boxed{a+b+d}"),
    ("2x", "\\boxed{2}"),
    ("(2,3)", "\\boxed{(3,2)}"),
    ("5 or 7", "\\boxed{5}"),
    (["5", "-5"], "\\boxed{5}"),
    ("3.2e21", "\\boxed{3.2 \\times 10^{20}}"),
    ("5e-11", "\\boxed{0}"),
    ("2.9e-19", "\\boxed{1.3e-27}"),
    ("2.9e-19", "\\boxed{2.8e-19}"),
    ("0.0000021", "\\boxed{0.0000024}"),
    ("\\text{(B)}", "\\boxed{C}"),
    ("[-3,2)", "\\boxed{[-3,2]}"),
    ("1000000", "\\boxed{1000001}"),
]


@pytest.mark.parametrize(("reference", "completion"), RIGHT)
def test_right_answers(reference, completion):
    assert grade(completion, {"answer": reference}) == 1


@pytest.mark.parametrize(("reference", "completion"), WRONG)
def test_wrong_answers(reference, completion):
    assert grade(completion, {"answer": reference}) == 0


def test_boxed_only_scores_nothing_outside_a_box():
    strict = build(boxed_only=True)
    assert strict("The answer is 42", {"answer": "42"}) == 0
    assert strict("The answer is \\boxed{42}", {"answer": "42"}) == 1


def test_final_answer_takes_box_then_mark_then_number():
    assert final_answer("7, \\boxed{\\frac{1}{2}} and 9\n#### 8") == "\\frac{1}{2}"
    assert final_answer("7\n#### 1,024") == "1,024"
    assert final_answer("first 7, then -1,024.5 apples") == "-1,024.5"
    assert final_answer("none at all") is None
    assert last_boxed("\\boxed{1} \\boxed{2") == "1"
    assert last_boxed("} \\boxed{1 \\fbox {{2}} {") == "{2}", "an outer box may be open"
    assert last_boxed("\\boxed{a\\boxed{b}c} \\boxed{ }") == "b"


def test_boxes_that_are_never_closed_take_one_pass():
    started = time.perf_counter()
    assert last_boxed("\\boxed{1}" + "\\boxed{" * 5000) == "1"
    assert time.perf_counter() - started < 3


# --- workers ---------------------------------------------------------------------------------------------------

FUNCTIONS = """
    import ctypes, os, re, signal, subprocess, sys, time

    def behave(completion, example, scale=1.0):
        if completion == "hang":
            while True: pass
        if completion == "hold":        # a regular expression holds the interpreter: no Python code runs
            if "note" in example:
                with open(example["note"], "w") as note: note.write(str(os.getpid()))
            re.match(r"(a+)+$", "a" * 40 + "b")
        if completion == "raise":
            raise KeyError("no such thing")
        if completion == "exit":
            os._exit(3)
        if completion == "quit":
            sys.exit("no more")
        if completion == "segfault":
            ctypes.string_at(0)
        if completion == "nan":
            return float("nan")
        if completion == "none":
            return None
        if completion == "huge":
            return 10**400
        if completion == "child":       # a child process that survives a naive kill of the worker
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(example["note"], "w") as note: note.write(str(child.pid))
            time.sleep(600)
        if completion == "print":
            print("to one", flush=True)
            print("and the other", file=sys.stderr, flush=True)
        if completion == "memory":
            return float(len(bytearray(b"x" * (1 << 30))))
        if completion == "torch":
            return float("torch" in sys.modules)
        if completion == "sleep":
            with open(example["note"], "w") as note: note.write(str(os.getpid()))
            time.sleep(600)
        return scale * len(completion)
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(textwrap.dedent(FUNCTIONS))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_rewards:behave"


def alive(pid: int) -> bool:
    """Running, not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_within(seconds: float, pid: int) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.slow
def test_a_bad_answer_affects_no_other(functions):
    odd = ["aa", "hang", "b", "raise", "exit", "ccc", "hold", "segfault", "nan", "none", "dd"]
    answers = [*odd, *["e"] * 19, "quit", "huge"]
    with Rewards([RewardTerm(name=functions, weight=2.0, options={"scale": 10})], timeout=1.0, workers=2) as rewards:
        batch = rewards.score(answers, [{}] * len(answers))
        good = {0: 20, 2: 10, 5: 30, 10: 20} | dict.fromkeys(range(11, 30), 10)
        assert batch.parts[functions] == [good.get(i, 0.0) for i in range(len(answers))]
        assert batch.total == [2.0 * value for value in batch.parts[functions]]
        reasons = dict(batch.failures)
        assert sorted(reasons) == [1, 3, 4, 6, 7, 8, 9, 30, 31]
        assert "no result within 1 s" in reasons[1]
        assert "no result within 1 s" in reasons[6]
        assert re.search(r"KeyError: 'no such thing' \(my_rewards\.py, line \d+\)", reasons[3])
        assert "exit code 3" in reasons[4]
        assert f"signal {signal.SIGSEGV.value}" in reasons[7]
        assert "nan" in reasons[8]
        assert "NoneType instead of a number" in reasons[9]
        assert "SystemExit: no more" in reasons[30]
        assert "int instead of a number" in reasons[31]
        again = rewards.score(["aa", "b"], [{}] * 2)  # the replaced workers serve on, with no stale replies
        assert again.parts[functions] == [20, 10]
        assert again.failures == []


@pytest.mark.slow
def test_math_that_hangs_or_explodes_is_one_failure():
    tower = "\\boxed{9^{9^{9^{9}}}}"
    with Rewards([RewardTerm(name="math")], timeout=2.0, workers=1) as rewards:
        batch = rewards.score(["\\boxed{4}", tower, "\\boxed{4}", "\\boxed{5}"], [{"answer": "4"}] * 4)
    assert batch.parts["math"] == [1, 0, 1, 0]
    assert [index for index, _ in batch.failures] == [1]


def test_workers_are_lazy_few_light_and_persistent(functions):
    with Rewards([RewardTerm(name=functions)], workers=2) as rewards:
        assert rewards._pool._workers == []
        batch = rewards.score(["torch"] * 8, [{}] * 8)
        assert batch.parts[functions] == [0] * 8
        before = {worker.process.pid for worker in rewards._pool._workers}
        assert len(before) == 2
        rewards.score(["a"] * 8, [{}] * 8)
        assert {worker.process.pid for worker in rewards._pool._workers} == before
    assert not any(alive(pid) for pid in before)


def test_reward_may_print_into_a_closed_pipe(functions):
    shown, (reader, writer) = os.dup(2), os.pipe()
    os.close(reader)
    try:
        os.dup2(writer, 2)  # as with `2>&1 | head -1`
        with Rewards([RewardTerm(name=functions)], workers=1) as rewards:
            batch = rewards.score(["print"] * 2, [{}] * 2)
    finally:
        os.dup2(shown, 2)
        os.close(shown)
        os.close(writer)
    assert batch.failures == []
    assert batch.parts[functions] == [5, 5]


def test_a_user_function_has_a_memory_limit(functions):
    with Rewards([RewardTerm(name=functions)], workers=1, memory=0.5) as rewards:
        batch = rewards.score(["memory", "aa"], [{}, {}])
    assert batch.total == [0, 2]
    assert "MemoryError" in batch.failures[0][1]
    with Rewards([RewardTerm(name=functions)], workers=1) as rewards:
        assert rewards.score(["memory"], [{}]).total == [1 << 30]


@pytest.mark.slow
def test_killed_grader_also_ends_its_child_processes(functions, tmp_path):
    note = tmp_path / "pid"
    with Rewards([RewardTerm(name=functions)], timeout=1.0, workers=1) as rewards:
        rewards.score(["child"], [{"note": str(note)}])
    assert gone_within(5, int(note.read_text()))


@pytest.mark.parametrize(("answer", "timeout"), [("sleep", 500), ("hold", 2)])
@pytest.mark.slow
def test_workers_die_with_a_killed_parent(functions, tmp_path, answer, timeout):
    note = tmp_path / "pid"
    code = (
        "from alula.rewards import Rewards, RewardTerm\n"
        f"rewards = Rewards([RewardTerm(name={functions!r})], timeout={timeout})\n"
        f"rewards.score([{answer!r}], [{{'note': {str(note)!r}}}])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(tmp_path)})
    end = time.monotonic() + 20
    while not (note.exists() and note.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    worker = int(note.read_text())
    assert alive(worker)
    parent.kill()
    parent.wait()
    assert gone_within(5, worker)


def test_an_interrupted_batch_leaves_no_replies_behind(functions):
    with Rewards([RewardTerm(name=functions)], workers=2) as rewards:
        rewards.start()
        with pytest.raises((TypeError, AttributeError), match=r"pickle|local object"):
            rewards.score(["aaaa", "b"], [{}, {"no": lambda: None}])
        assert rewards.score(["cc"], [{}]).parts[functions] == [2]


def test_grading_in_the_background_gives_the_same(functions):
    terms = [RewardTerm(name=functions), RewardTerm(name="length", weight=2.0, options={"target": 2})]
    answers = Answers(["aa", "raise", "b"], [{}] * 3, ["stop"] * 3, [2, 1, 1])
    with Rewards(terms, workers=2) as rewards:
        result = rewards.begin(answers)
        assert result() == rewards.score(answers.completions, answers.examples, answers.finishes, answers.lengths)


def test_closing_ends_a_grading(functions, tmp_path):
    note = tmp_path / "pid"
    rewards = Rewards([RewardTerm(name=functions)], timeout=500, workers=1)
    result = rewards.begin(Answers(["sleep", "a"], [{"note": str(note)}, {}], None, None))
    end = time.monotonic() + 60
    while not (note.exists() and note.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    rewards.close()
    assert gone_within(5, int(note.read_text()))
    with pytest.raises(CancelledError):
        result()
    assert rewards.score(["aa"], [{}]).total == [2]  # it can be used again
    rewards.close()


# --- names and options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RewardTerm(name="maths"), "did you mean 'math'"),
        (RewardTerm(name="length"), "max_tokens and buffer"),
        (RewardTerm(name="length", options={"maximum": 3}), "maximum"),
        (RewardTerm(name="length", options={"target": "x"}), "reward length: target='x' must be a whole number"),
        (RewardTerm(name="length", options={"target": 2.5}), "reward length: target=2.5 must be a whole number"),
        (RewardTerm(name="task:pointer", options={"partial": "no"}), "reward task:pointer: partial='no' must be true"),
        (RewardTerm(name="model:/nowhere", options={"folder": "/"}), "unknown option of reward model:/nowhere"),
        (RewardTerm(name="task:pointr"), "did you mean 'pointer'"),
        (RewardTerm(name="model:/nowhere/at/all"), "model:/nowhere/at/all"),
    ],
)
def test_invalid_settings_raise_when_built(spec, message):
    with pytest.raises(SettingError, match=message):
        Rewards([spec])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RewardTerm(name="no_such_module:f"), "'no_such_module'"),
        (RewardTerm(name="my_rewards:behav"), "did you mean 'behave'"),
        (RewardTerm(name="math", options={"boxed": True}), "did you mean 'boxed_only'"),
        (RewardTerm(name="math", options={"boxed_only": "no"}), "reward math: boxed_only='no' must be true or false"),
        (RewardTerm(name="format", options={"pattern": "("}), "pattern"),
        (RewardTerm(name="format", options={"pattern": 3}), "reward format: pattern=3 must be a text"),
        (RewardTerm(name="format", options={"pattern": "a", "has": "boxed"}), "either has=boxed, has=think or pattern"),
        (RewardTerm(name="code", options={"timeout": 3.0}), "unknown option of reward code 'timeout'"),
        (RewardTerm(name="code", options={"memory": "1g"}), "reward code: memory='1g' must be a whole number"),
    ],
)
def test_invalid_graders_raise_at_start(functions, spec, message):
    with Rewards([spec], workers=1) as rewards, pytest.raises(SettingError, match=message):
        rewards.start()


def test_different_numbers_of_completions_and_examples_raise():
    with pytest.raises(SettingError, match="2 completions but 1 examples"):
        Rewards([RewardTerm(name="length", options={"target": 3})]).score(["a", "b"], [{}])


# --- the other kinds --------------------------------------------------------------------------------------------


def test_weights_parts_and_repeated_names():
    specs = [
        "math",
        RewardTerm(name="format", weight=0.25, options={"has": "boxed"}),
        RewardTerm(name="format", weight=0.5, options={"pattern": r"\AThus"}),
        RewardTerm(name="length", weight=0.1, options={"target": 10}),
    ]
    completions = ["Thus \\boxed{3}", "3", "\\boxed{4}"]
    with Rewards(specs, workers=1) as rewards:
        batch = rewards.score(completions, [{"answer": "3"}] * 3, lengths=[10, 5, 40])
    assert batch.parts == {"math": [1, 1, 0], "format": [1, 0, 1], "format#2": [1, 0, 0], "length": [0, -0.5, -1]}
    assert batch.total == pytest.approx([1 + 0.25 + 0.5, 1 - 0.05, 0.25 - 0.1])


def test_overlong_penalty_is_that_of_dapo():
    def paper(length: int, l_max: int, l_cache: int) -> float:
        if length <= l_max - l_cache:
            return 0
        return ((l_max - l_cache) - length) / l_cache if length <= l_max else -1

    for length in range(0, 130):
        assert overlong_penalty(length, 100, 30) == pytest.approx(paper(length, 100, 30))
    assert target_penalty(12, 10) == pytest.approx(-0.2)
    length = Rewards([RewardTerm(name="length", options={"max_tokens": 100, "buffer": 30})])
    assert length.score(["", ""], [{}, {}], ["length", "stop"], [60, 60]).total == [-1, 0]


def test_thinking_format():
    check = answer_format.build(has="think")
    good = ["<think>a</think> b", "a</think>b", "\n<think>\na\n</think>\n\nb"]
    bad = ["b", "<think>a", "<think>a</think>", "<think></think>b", "<think>a</think>b</think>", "x<think>a</think>b"]
    assert [check(text, {}) for text in good] == [1] * len(good)
    assert [check(text, {}) for text in bad] == [0] * len(bad)


@pytest.mark.slow
def test_reasoning_gym_scores_its_own_answers():
    pytest.importorskip("reasoning_gym")
    from alula.data import load

    data = load("reasoning-gym:chain_sum", size=4, seed=3)
    first, second, third = (example.answer for example in data[:3])
    texts = [
        f"so <answer>{first}</answer>",
        f"<answer>\n{second}\n</answer>",
        f"\\boxed{{{third}}}",
        "<answer>x</answer>",
    ]
    with Rewards([RewardTerm(name="reasoning-gym:chain_sum")], workers=1) as rewards:
        values = rewards.score(texts, [e.record() for e in data]).total
    assert values[:3] == [1, 1, 1]
    assert values[3] < 0.5


def test_task_reward_exact_and_partial():
    examples = [{"answer": "b c d"}] * 3
    texts = ["b c d a", "b c a", ""]
    assert Rewards([RewardTerm(name="task:successor")]).score(texts, examples).total == [1, 0, 0]
    partial = Rewards([RewardTerm(name="task:successor", options={"partial": True})]).score(texts, examples).total
    assert partial == pytest.approx([1, 2 / 3, 0])


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("labels", [1, 3])
def test_model_reward_equals_one_by_one_scoring(tmp_path, labels, family):
    """BERT looks at its first token and has absolute positions, a decoder at its last one."""
    import torch
    import transformers

    from alula.data.tasks import build as build_task
    from alula.data.tasks.tokenizer import task_tokenizer

    task = build_task("pointer")
    tokenizer = task_tokenizer(task)
    torch.manual_seed(0)
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForSequenceClassification),
        "bert": (transformers.BertConfig, transformers.BertForSequenceClassification),
    }[family]
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=labels,
        pad_token_id=0,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    model = model_class(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    data = task.dataset(5)
    completions = [" ".join(["a", "b", "c"][: 1 + i % 3]) for i in range(5)]
    options = {"batch_size": 2} | ({"label": "LABEL_2"} if labels > 1 else {})
    batch = Rewards([RewardTerm(name=f"model:{tmp_path}", options=options)]).score(
        completions, [e.record() for e in data]
    )
    for example, completion, value in zip(data, completions, batch.total):
        ids = torch.tensor([tokenizer(example.prompt + completion)["input_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
        assert value == pytest.approx(float(logits[0] if labels == 1 else logits.softmax(-1)[2]), abs=1e-5)
    assert not math.isclose(batch.total[0], batch.total[1], abs_tol=1e-4)
    if labels > 1:
        with pytest.raises(SettingError, match="LABEL_0"):
            Rewards([RewardTerm(name=f"model:{tmp_path}")])


def test_model_reward_rejects_pickled_weights(tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from alula.data.tasks import build as build_task
    from alula.data.tasks.tokenizer import task_tokenizer

    tokenizer = task_tokenizer(build_task("pointer"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_labels=1,
    )
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    torch.save(LlamaForSequenceClassification(config).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(SettingError, match="safetensors"):
        Rewards([RewardTerm(name=f"model:{tmp_path}")])
