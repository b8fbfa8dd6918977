"""Driver for the continuous batching of transformers, with one manager for the whole run."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cpu" / "drivers"))

import torch
import transformers
from protocol import Driven, Queries, drive
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

MOST_NEW_TOKENS = 2048
PATIENCE = 1.0  # seconds between two checks whether it still runs


def load(settings: dict) -> Driven:
    """Load the model with paged attention over torch's SDPA."""
    on_gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to("cuda" if on_gpu else "cpu").eval()
    config = GenerationConfig(max_new_tokens=MOST_NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = None if on_gpu else ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256)  # default: most memory
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=sizes)
    notes = ["continuous batching", f"attention {model.config._attn_implementation}"]

    def run(queries: Queries) -> list[int]:
        names = [manager.add_request(q["prompt"], max_new_tokens=q["out"], eos_token_id=-1) for q in queries]
        if not manager.is_running():
            manager.start()  # with queued work: some versions cannot start without
        lengths: dict[str, int] = {}
        while len(lengths) < len(names):
            result = manager.get_result(timeout=PATIENCE)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the manager has stopped")
            elif result.error is not None:
                raise RuntimeError(result.error)
            elif result.is_finished():
                lengths[result.request_id] = len(result.generated_tokens)
        return [lengths[name] for name in names]

    return Driven(run, transformers.__version__, torch.get_num_threads(), notes)


if __name__ == "__main__":
    drive(load)
    os._exit(0)  # the manager's thread would not end
