"""New weights from a folder of safetensors files."""

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from alula.engine.engine import Engine
from alula.errors import SettingError, require

MARKER = "STABLE"
"""The file that a trainer writes last: the folder is complete."""


def checked_folder(root: Path | None, given: str) -> Path:
    """The folder that a client names, which must lie below `root` and be complete."""
    if root is None:
        raise SettingError("/update_weights is off; start the server with --weights-folder to allow it.")
    root = root.resolve()
    require("\0" not in given, "weight_dir: holds a null character; give a folder.")
    try:
        folder = (root / given).resolve()
        require(folder.is_relative_to(root), f"weight_dir={given!r}: must lie below the server's --weights-folder.")
        require(folder.is_dir(), f"weight_dir={given!r}: no such folder below the server's --weights-folder.")
        require((folder / MARKER).is_file(), f"weight_dir={given!r}: no file {MARKER} in it; write it last.")
        outside = [file.name for file in weight_files(folder) if not file.resolve().is_relative_to(root)]
    except (OSError, RuntimeError) as error:  # a name that is too long, no permission, links in a circle
        reason = getattr(error, "strerror", None) or "a loop of links"
        raise SettingError(f"weight_dir={given[:100]!r}: cannot be read ({reason}); give another folder.") from None
    require(not outside, f"weight_dir={given!r}: {', '.join(outside[:1])} links to a file outside --weights-folder.")
    return folder


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read_weights(folder: Path, engine: Engine) -> list[tuple[str, Tensor]]:
    """All parameters of the model, in host memory; raises if one is missing."""
    files = weight_files(folder)
    try:
        weights = [pair for file in files for pair in tensors(file)]
    except (OSError, SafetensorError) as error:
        raise SettingError(f"weight_dir={folder.name!r}: cannot be read ({error}).") from None
    names = {name for name, _ in weights}
    # Tied parameters have several names, of which a file holds one.
    held = {id(p) for name, p in engine.model.named_parameters(remove_duplicate=False) if name in names}
    missing = [name for name, p in engine.model.named_parameters() if id(p) not in held]
    require(
        not missing,
        f"weight_dir={folder.name!r}: {len(missing)} of the model's parameters are not in its {len(files)} safetensors "
        f"files, such as {', '.join(missing[:1])}.",
    )
    return weights


def tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            yield name, opened.get_tensor(name)
