"""Setup of all tests: one thread per worker, no network, the tiny models and the real one."""

import os

# Two workers on two cores: more threads would only fight. All of these must be set before the imports below.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# Some virtual machines announce AMX and cannot execute it; torch's bfloat16 products would end the process there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported: kernels then run on the CPU
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

if TYPE_CHECKING:
    from alula.models.load import LoadedModel

TINY = ("tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral")
SMOLLM2 = Path(__file__).parents[1] / ".cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(params=TINY)
def tiny(request: pytest.FixtureRequest) -> "LoadedModel":
    """A fresh model with random weights of each family: group sizes 1, 3, 2, 4; heads tied and not."""
    from alula.models.load import load_model

    return load_model(f"shape:{request.param}")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The smallest recipe: a model, data and a reward."""
    path = tmp_path / "small.yaml"
    path.write_text(
        "model: {source: shape:tiny-llama}\ndata: {source: task:copy-last}\nrewards: {use: [task:copy-last]}\n"
    )
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of a real pretrained model."""
    if not SMOLLM2.exists():
        reason = f"{SMOLLM2.name} is not in {SMOLLM2.parent}; `make model` fetches it"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return SMOLLM2


@pytest.fixture(scope="session")
def smollm2_model(smollm2: Path) -> "LoadedModel":
    """That model, loaded once in float32. Do not change its weights or its config."""
    from alula.models.load import load_model

    return load_model(smollm2)


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_model: "LoadedModel", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That model as a Hugging Face folder, which loads much faster than GGUF."""
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2_model.model.save_pretrained(folder)
    smollm2_model.tokenizer.save_pretrained(folder)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("real"):
            item.add_marker(pytest.mark.xdist_group("real"))  # one worker loads the model, which takes long
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
