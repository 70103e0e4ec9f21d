import pytest

import alula
from alula.errors import SettingError, with_place
from alula.files import check_same_settings, count_text, plus_minus, size_text, write_atomically


def test_an_interrupted_write_leaves_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    write_atomically(path, "old ξ")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        write_atomically(path, "new")
    assert path.read_text(encoding="utf-8") == "old ξ"
    monkeypatch.undo()
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("target", ["/dev/null", "page.html"])
def test_a_link_stays_a_link_and_a_device_a_device(tmp_path, target):
    path = tmp_path / "link"
    path.symlink_to(target)
    for text in ("old", "new"):
        write_atomically(path, text)
    assert path.is_symlink()
    assert path.read_text() == ("" if target == "/dev/null" else "new")
    assert not list(tmp_path.glob("*.part"))


def test_other_settings_are_named_with_both_values():
    check_same_settings("work", {"seed": 1, "rank": 4}, {"seed": 1}, "use another file")
    for before, message in (({"seed": 2}, "seed=2, not seed=1"), ({}, "seed=None, not seed=1")):
        with pytest.raises(SettingError, match=f"work .* {message}; use another file"):
            check_same_settings("work", before, {"seed": 1}, "use another file")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.0 MiB"), (3 * 2**19, "1.5 MiB"), (2**30, "1.00 GiB"), (5 * 2**29, "2.50 GiB")]
)
def test_sizes(size, text):
    assert size_text(size) == text


def test_counts():
    assert [count_text(count, "step") for count in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


def test_standard_errors():
    assert [plus_minus(error) for error in (0.0214, 0.0, None)] == [" ± 2.1%", "", ""]


def test_an_error_is_placed_in_a_persons_own_code():
    """Also where that stands in a folder whose name begins as Alula's own."""
    for file, placed in ((f"{alula.__path__[0]}_mine/reward.py", True), (f"{alula.__path__[0]}/reward.py", False)):
        with pytest.raises(ZeroDivisionError) as raised:
            exec(compile("\n1 / 0", file, "exec"))
        text = with_place(raised.value.with_traceback(raised.tb.tb_next))
        assert text == "ZeroDivisionError: division by zero" + placed * " (reward.py, line 2)"
