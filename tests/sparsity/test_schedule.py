"""Schedules: lookup, files, errors, and the published presets."""

import json
import re

import pytest

from alula.errors import SettingError
from alula.sparsity.policy import Evict, Select, Sparsity, check_schedules, describe
from alula.sparsity.schedule import PRESETS, Schedule
from alula.trainer.preflight import load_model_config
from alula.trainer.start_warnings import schedules_of_other_models

PRESET_NAMES = sorted(path.stem for path in PRESETS.glob("*.json"))


def test_lookup_is_by_length_and_the_last_bin_is_open():
    schedule = Schedule((64, 128, 256), width=100)
    assert [schedule.at(length) for length in (0, 99, 100, 199, 200, 299, 300, 10**9)] == [
        64,
        64,
        128,
        128,
        256,
        256,
        256,
        256,
    ]


def test_a_saved_schedule_loads_unchanged(tmp_path):
    schedule = Schedule((64, 128), width=50, name="x", model="m", method="rkv", block=None, notes={"tau": 0.9})
    schedule.save(tmp_path / "x.json")
    again = Schedule.load(tmp_path / "x.json")
    assert again == schedule
    assert again.notes == {"tau": 0.9}


def test_another_use_raises():
    schedule = Schedule((64,), name="x", model="m", method="block-topk", block=16)
    schedule.check(method="block-topk", block=16, model="m")
    for wrong in (
        {"method": "quest", "block": 16, "model": "m"},
        {"method": "block-topk", "block": 32, "model": "m"},
        {"method": "block-topk", "block": 16, "model": "n"},
    ):
        with pytest.raises(SettingError, match="was planned for"):
            schedule.check(**wrong)


@pytest.mark.parametrize(
    ("method", "block", "options", "text", "message"),
    [
        (
            "block-topk",
            4,
            {"block": 4, "dense_layers": 0},
            "block-topk:{file}",
            "block=4, dense_layers=0; write block-topk:{file},block=4,dense_layers=0.",
        ),
        ("quest", 4, {}, "quest:{file},dense_layers=1", "block=4; write quest:{file},block=4,dense_layers=1."),
        (
            "rkv",
            None,
            {"buffer": 8, "mix": 0.5},
            "rkv:{file}+8,sinks=1",
            "mix=0.5; write rkv:{file}+8,sinks=1,mix=0.5.",
        ),
        ("rkv", None, Evict("rkv", 64).settings, "rkv:{file},mix=0.5", "mix=0.1; write rkv:{file}+128."),
    ],
)
def test_a_file_planned_with_other_settings_says_what_to_write(tmp_path, method, block, options, text, message):
    file = tmp_path / "schedule.json"
    Schedule((24, 64), width=50, method=method, block=block, notes={"options": options}).save(file)
    with pytest.raises(SettingError) as raised:
        check_schedules(Sparsity.parse(text.format(file=file)), "some/model")
    assert str(raised.value) == f"{file} was planned with {message.format(file=file)}"
    written = str(raised.value).rpartition("; write ")[2].removesuffix(".")
    check_schedules(Sparsity.parse(written), "some/model")


def test_a_default_written_out_is_the_same_setting(tmp_path):
    """In the schedule's file, in the policy that uses it, and in the evictor beside a selector."""
    written, plain = Evict("rkv", 64, mix=0.1, kernel=7), Evict("rkv", 64)
    assert (written, written.settings, written.options) == (plain, plain.settings, ())
    file = tmp_path / "schedule.json"
    Schedule((24, 64), width=50, method="rkv", notes={"options": written.settings}).save(file)
    for text in (f"rkv:{file}", f"rkv:{file},mix=0.1"):
        check_schedules(Sparsity.parse(text), "some/model")
    beside = {"evict": describe(written, full=True)}
    Schedule((64, 80), width=50, method="quest", block=16, notes={"beside": beside}).save(file)
    check_schedules(Sparsity.parse(f"rkv:64 & quest:{file}"), "some/model")
    with pytest.raises(SettingError, match=r"evict=rkv:64.*mix=0\.1.*, not evict=rkv:64.*mix=0\.5"):
        check_schedules(Sparsity.parse(f"rkv:64,mix=0.5 & quest:{file}"), "some/model")


def test_bad_files_raise(tmp_path):
    with pytest.raises(SettingError, match=r"did you mean 'qwen3-4b-0.86'"):
        Schedule.load("qwen3-4b-086")
    for text in ("{", '{"width": 3}', '{"budgets": [1], "colour": 2}', '{"budgets": []}', '{"budgets": [0]}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(SettingError):
            Schedule.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rkv:-5", "budget '-5': must be a whole number of at least 1"),
        ("rkv:64.5", "budget '64.5': must be a whole number of at least 1"),
        ("quest:1e3", "budget '1e3': must be a whole number of at least 1"),
        ("rkv:8+", "sparsity 'rkv:8+': the buffer is one whole number after one +"),
        ("rkv:512+128+1", "sparsity 'rkv:512+128+1': the buffer is one whole number after one +"),
        ("rkv:512+-3", "sparsity 'rkv:512+-3': the buffer is one whole number after one +"),
        ("rkv:none.json", "schedule file none.json: "),
        ("rkv:plans/mine+64", "schedule file plans/mine: "),
        ("quest:qwen3-4b-086", "did you mean 'qwen3-4b-0.86'?"),
    ],
)
def test_a_bad_budget_gives_a_hint(text, message):
    with pytest.raises(SettingError, match=re.escape(message)) as raised:
        Sparsity.parse(text)
    assert "known:" not in str(raised.value)


@pytest.mark.parametrize("text", ['{"bandwidth": 1, "records": []}', '{"budgets": ["a"]}', "[{}]", "{"])
def test_another_kind_of_file_raises(tmp_path, text):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(SettingError, match=rf"schedule file {path}: not a schedule \(.*\);"):
        Sparsity.parse(f"rkv:{path}")


def test_every_published_schedule_is_a_preset():
    published = {
        "1.7b": ["0.75", "0.80", "0.83", "0.86", "0.88", "0.90", "0.92", "0.94"],
        "4b": ["0.75", "0.80", "0.86", "0.88", "0.90", "0.92"],
        "8b": ["0.75", "0.80", "0.86", "0.87", "0.92"],
        "14b": ["0.86"],
    }
    assert sorted(f"qwen3-{size}-{tau}" for size, taus in published.items() for tau in taus) == PRESET_NAMES


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_a_preset_is_well_formed(name):
    schedule = Schedule.load(name)
    assert schedule.name == name
    assert (schedule.method, schedule.block, schedule.width) == ("block-topk", 16, 2000)
    assert len(schedule.budgets) == 20
    assert list(schedule.budgets) == sorted(schedule.budgets)
    assert all(budget % 16 == 0 for budget in schedule.budgets)
    assert schedule.notes["model"].lower() == f"qwen/qwen3-{name.split('-')[1]}"
    assert schedule.notes["tau"] == float(name.split("-")[2])


def repeat(*runs: tuple[int, int]) -> list[int]:
    return [pages for pages, bins in runs for _ in range(bins)]


PAGES = {
    "qwen3-1.7b-0.86": repeat((32, 1), (64, 1), (96, 2), (128, 1), (160, 1), (192, 1), (224, 2), (256, 11)),
    "qwen3-4b-0.86": repeat(
        (32, 1),
        (48, 1),
        (64, 1),
        (80, 1),
        (96, 1),
        (128, 1),
        (160, 1),
        (224, 1),
        (256, 2),
        (320, 4),
        (384, 4),
        (512, 2),
    ),
    "qwen3-8b-0.86": repeat(
        (32, 1),
        (48, 1),
        (64, 1),
        (80, 1),
        (128, 1),
        (160, 1),
        (192, 1),
        (256, 4),
        (320, 6),
        (384, 1),
        (448, 2),
    ),
    "qwen3-14b-0.86": repeat((32, 1), (48, 1), (80, 1), (128, 1), (256, 1), (384, 10), (512, 1), (640, 2), (896, 2)),
    "qwen3-1.7b-0.75": repeat((32, 2), (48, 2), (64, 2), (80, 2), (96, 12)),
    "qwen3-4b-0.92": repeat(
        (48, 1),
        (96, 1),
        (160, 1),
        (192, 1),
        (256, 1),
        (384, 1),
        (448, 1),
        (768, 1),
        (896, 1),
        (1024, 2),
        (1152, 9),
    ),
}


@pytest.mark.parametrize("name", PAGES)
def test_published_pages(name):
    assert [budget // 16 for budget in Schedule.load(name).budgets] == PAGES[name]


@pytest.mark.parametrize(("size", "share"), [("1.7b", 0.17), ("4b", 0.21), ("8b", 0.20), ("14b", 0.31)])
def test_share_of_the_kv_that_the_published_schedules_read(size, share):
    schedule = Schedule.load(f"qwen3-{size}-0.86")
    lengths = range(37_000)
    read = sum(min(schedule.at(length), length) for length in lengths)
    assert read / sum(lengths) == pytest.approx(share, abs=0.006)


def test_the_repaired_entry_is_documented():
    assert "388" in json.loads((PRESETS / "qwen3-8b-0.86.json").read_text())["notes"]["changed"]


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_a_preset_warns_for_a_model_of_another_geometry(name):
    policy = Sparsity(select=Select("block-topk", Schedule.load(name)))
    model = f"shape:qwen3-{name.split('-')[1]}"
    assert schedules_of_other_models([policy], load_model_config(model)) == []
    for other, size in (("qwen3-0.6b", "num_hidden_layers|hidden_size"), ("smollm2-135m", "model_type")):
        (warning,) = schedules_of_other_models([policy], load_model_config(f"shape:{other}"))
        assert re.match(rf"Schedule '{name}' .* Qwen/Qwen3-\S+ \(({size})=\w+, here \w+\)", warning)


def test_only_presets_warn_by_geometry():
    mine = Schedule((64,), model="tiny-llama", notes={"tau": 0.9})
    for policy in (Sparsity(), Sparsity(Evict("rkv", 64)), Sparsity(select=Select("quest", mine))):
        assert schedules_of_other_models([policy], load_model_config("shape:tiny-llama")) == []
