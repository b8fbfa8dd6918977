"""SmolLM2-135M-Instruct, a published model: its file, the same model in transformers, and a server of it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.config import EngineOptions
from quire.errors import QuireError
from quire.hub.locate import locate
from quire.startup.build import prepare
from quire.weights.gguf.checkpoint import GgufCheckpoint

_SERVE = (sys.executable, "-c", "from quire.cli import main; main()", "serve", "--port", "0")
_LICENSE = Path("/usr/share/common-licenses/GPL-3")


def model_file() -> Path:
    """The .gguf file: of the variable QUIRE_SMOLLM2, or of `quire pull smollm2`. Without both the test is skipped."""
    given = os.environ.get("QUIRE_SMOLLM2")
    try:
        return locate(given or "smollm2", offline=True, report=lambda line: None, progress=lambda done, total: None)
    except QuireError as error:
        if given:
            raise
        pytest.skip(f"SmolLM2 is not on this machine; `make test-real` fetches it ({error})")


def transformers_model(file: Path) -> LlamaForCausalLM:
    """The model in float32. transformers' own reader of GGUF needs another package, so quire's reads the weights."""
    checkpoint = GgufCheckpoint(file)
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).float().eval()
    missing, unexpected = model.load_state_dict(dict(checkpoint.read(checkpoint.tensors)), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


@torch.inference_mode()
def reference_logits(model: LlamaForCausalLM, ids: list[int], first: int) -> torch.Tensor:
    """Logits (len(ids) - first, vocab_size) that predict the tokens from `first` on."""
    return model(torch.tensor([ids])).logits[0, first - 1 : -1]


def memory_of_pool(num_tokens: int, **options) -> str:
    """The option `memory` with which the engine with these options gets a KV pool of `num_tokens` tokens."""
    plenty = 2 * 2**30
    asked = EngineOptions(**options, memory=f"{plenty}")
    cache = prepare(asked, report=lambda line: None, progress=lambda done, total: None).cache
    (group,) = cache.groups
    return f"{plenty - (group.num_blocks - num_tokens // cache.block_size) * group.bytes_per_block}"


def license_text() -> str:
    """The GNU General Public License, unwrapped: one line a paragraph."""
    if not _LICENSE.exists():
        pytest.skip(f"{_LICENSE} is of Debian's package base-files")
    return "\n\n".join(" ".join(part.split()) for part in _LICENSE.read_text(encoding="utf-8").split("\n\n"))


class Served:
    """A running `quire serve`."""

    def __init__(self, pid: int, url: str) -> None:
        self._pid = pid
        self.url = url

    def kill_engine(self) -> None:
        """Send SIGKILL to the engine process."""
        lists = Path(f"/proc/{self._pid}/task").glob("*/children")  # any thread may be the parent
        os.kill(next(int(child) for each in lists for child in each.read_text().split()), signal.SIGKILL)


@contextmanager
def served(*arguments: str) -> Iterator[Served]:
    """A server process. arguments: the model and flags of `quire serve`."""
    with subprocess.Popen([*_SERVE, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = next(found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            yield Served(process.pid, url)
        finally:
            process.kill()
