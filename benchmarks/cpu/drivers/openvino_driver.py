"""Driver for OpenVINO GenAI with continuous batching in bfloat16. It reads a GGUF file.

On a single core, OpenVINO 2026.4 ends with a division by zero.
"""

import os

import numpy as np
import openvino
import openvino_genai
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig
from protocol import Driven, Queries, drive


def load(settings: dict) -> Driven:
    """Load the model into a pipeline with prefix caching."""
    scheduler = SchedulerConfig()
    scheduler.cache_size = 4  # GB
    scheduler.max_num_seqs = settings["max_num_seqs"]
    scheduler.enable_prefix_caching = True
    pipeline = ContinuousBatchingPipeline(settings["gguf"], scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})

    def run(queries: Queries) -> list[int]:
        prompts = [openvino.Tensor(np.array([query["prompt"]], np.int64)) for query in queries]
        outputs = pipeline.generate(prompts, [greedy(query["out"]) for query in queries])
        return [len(output.m_generation_ids[0]) for output in outputs]

    return Driven(
        run, openvino_genai.__version__, len(os.sched_getaffinity(0)), [f"from GGUF, {settings['gguf_type']}"]
    )


def greedy(num_tokens: int) -> GenerationConfig:
    """Generation settings for `num_tokens` greedy tokens."""
    config = GenerationConfig()
    config.max_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    drive(load)
