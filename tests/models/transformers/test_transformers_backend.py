"""The transformers backend against transformers: greedy tokens of mixed batches, logits, model descriptions."""

import numpy as np
import pytest
import random_checkpoints as checkpoints
import torch
import transformers
from unknown_architecture import SHAPE, UNKNOWN, loaded, prompt_of, save

from quire.core.kv_groups import KVGroup, kv_kind
from quire.kernels import reference
from quire.kernels.contract import Batch
from quire.layers.attend import PagedAttend, ScoreScaling
from quire.layers.context import ForwardContext
from quire.models.description import FAMILIES, describe
from quire.models.transformers import describe_transformers, load_transformers
from quire.weights.checkpoint import FolderCheckpoint

NUM_TOKENS = 32
LENGTHS = (1, 13, 30)

# models without a description in quire: name -> (name in transformers, differences from SHAPE)
KNOWN = ("llama-3", "opt", "gemma2", "gemma3", "qwen2-upper-window", "gpt2-scaled-by-layer", "mixtral-window")


@pytest.fixture(scope="module")
def made(tmp_path_factory, saved):
    """A function from a kind to (folder, transformers model), each created once."""
    found = {}

    def get(kind):
        if kind in KNOWN:
            return saved(kind)
        if kind not in found:
            family, values = UNKNOWN[kind]
            folder = tmp_path_factory.mktemp(kind)
            found[kind] = (folder, save(folder, family, **values))
        return found[kind]

    return get


class Paged:
    """Several sequences with scattered blocks, in one KV group per kind of layer."""

    def __init__(self, description, model, lengths, dtype="float32", block_size=4):
        self.model = model
        width = -(-max(lengths) // block_size)
        kinds = list(dict.fromkeys(description.kv_layers))
        storages = [self._allocate(description, kind, width * len(lengths), dtype, block_size) for kind in kinds]
        for storage in storages:
            storage.data.fill_(torch.nan)
        random = np.random.default_rng(0)
        self.tables = [random.permutation(width * len(lengths)).reshape(len(lengths), width) for _ in kinds]
        self.attend = PagedAttend(reference, storages, model.score_scaling)

    @staticmethod
    def _allocate(description, kind, num_blocks, dtype, block_size):
        layers = tuple(index for index, layer in enumerate(description.kv_layers) if layer == kind)
        group = KVGroup(layers, kind, dtype, num_blocks, 1)
        return reference.allocate(group, block_size, torch.device("cpu"))

    @torch.inference_mode()
    def logits(self, chunks):
        """chunks: (sequence, start, token ids). Returns per chunk the logits at all of its positions."""
        rows, starts, tokens = zip(*chunks, strict=True)
        lengths = [len(some) for some in tokens]
        stops = np.array(starts) + lengths
        self.attend.plan([Batch(np.array(starts), stops, table[list(rows)]) for table in self.tables])
        positions = torch.cat([torch.arange(a, b) for a, b in zip(starts, stops, strict=True)])
        ids = torch.tensor([token for some in tokens for token in some])
        context = ForwardContext(reference, self.attend, positions)
        return self.model.logits(self.model.forward(ids, context), context).float().split(lengths)


def generate(paged, prompts, cut):
    """Greedy tokens of all prompts, in steps that mix chunks of prompts with decoding."""
    known, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    targets = [len(prompt) + NUM_TOKENS for prompt in prompts]
    while rows := [row for row, target in enumerate(targets) if len(known[row]) < target]:
        chunks = [(row, done[row], known[row][done[row] : done[row] + cut]) for row in rows]
        for (row, start, tokens), logits in zip(chunks, paged.logits(chunks), strict=True):
            done[row] = start + len(tokens)
            if done[row] == len(known[row]):
                known[row].append(int(logits[-1].argmax()))
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]


def theirs(model, prompt):
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def test_the_fixtures_have_architectures_with_and_without_a_quire_description():
    assert len({f"{family}ForCausalLM" for family, _ in UNKNOWN.values()} - set(FAMILIES)) >= 5
    assert {checkpoints.architecture(kind) for kind in KNOWN} <= set(FAMILIES)


@pytest.mark.parametrize("kind", [*UNKNOWN, *KNOWN])
def test_greedy_tokens_of_a_mixed_batch_equal_generate(made, kind):
    folder, model = made(kind)
    description, backend = loaded(folder)
    prompts = [prompt_of(length) for length in LENGTHS]
    found = generate(Paged(description, backend, [length + NUM_TOKENS for length in LENGTHS]), prompts, cut=8)
    assert found == [theirs(model, prompt) for prompt in prompts]


@pytest.mark.parametrize("kind", [*UNKNOWN, *KNOWN])
def test_logits_at_all_positions_equal_transformers(made, kind):
    folder, model = made(kind)
    prompts = [prompt_of(length) for length in (21, 40, 62)]
    paged = Paged(*loaded(folder), [62] * 3)
    found = [[] for _ in prompts]
    for start in range(0, 62, 21):
        chunks = [(row, start, prompt[start : start + 21]) for row, prompt in enumerate(prompts) if start < len(prompt)]
        for (row, _, _), logits in zip(chunks, paged.logits(chunks), strict=True):
            found[row].append(logits)
    for prompt, parts in zip(prompts, found, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        assert (torch.cat(parts) - expected).abs().max() < 2e-6 * (expected.max() - expected.min())


@pytest.mark.parametrize("kind", ["exaone4", "vaultgemma", "diffllama", "olmoe"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(tmp_path, kind):
    family, values = UNKNOWN[kind]
    model = save(tmp_path, family, torch.bfloat16, **values)
    prompt = prompt_of(40)
    with torch.inference_mode():
        rounded = model(torch.tensor([prompt])).logits[0].float()
        truth = model.float()(torch.tensor([prompt])).logits[0]
    description, backend = loaded(tmp_path, "bfloat16")
    assert description.dtype == "bfloat16"
    (found,) = Paged(description, backend, [40], "bfloat16").logits([(0, 0, prompt)])
    assert (found - truth).abs().median() < 1.3 * (rounded - truth).abs().median()


def test_shards_and_a_tied_head(tmp_path):
    values = {**SHAPE, "head_dim": 16, "tie_word_embeddings": True}
    model = transformers.GlmForCausalLM(transformers.GlmConfig(**values)).eval()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    description, backend = loaded(tmp_path)
    assert description.num_parameters == model.num_parameters()
    (found,) = Paged(description, backend, [20]).logits([(0, 0, prompt_of(20))])
    assert torch.allclose(found, model(torch.tensor([prompt_of(20)])).logits[0], atol=1e-5)


def test_a_transformers_description_has_sizes_windows_and_score_scaling(made):
    folder, model = made("vaultgemma")
    description, backend = loaded(folder)
    assert (description.vocab_size, description.hidden_size, description.max_positions) == (checkpoints.VOCAB, 64, 256)
    assert description.kv_layers == tuple(kv_kind(2, 24, window) for window in (9, 0, 9, 0))
    assert list(backend.score_scaling) == [ScoreScaling(50**-0.5, 50.0)] * 4
    assert description.num_parameters == model.num_parameters()
    assert description.weight_bytes("bfloat16") == 2 * model.num_parameters()
    assert (description.dtype, description.eos_token_ids) == ("float32", (2,))
    assert 4 * 64 + 3 * 96 + 3 * 4 * 24 <= description.activations_per_token < 2000
    assert not backend.batch_invariant
    assert (backend.vocab_size, backend.device) == (checkpoints.VOCAB, torch.device("cpu"))


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 128}, 256),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "default"}, 256),
    ],
)
def test_scaled_positions_reach_as_far_as_in_quires_own_decoder(tmp_path, saved, rope, longest):
    for family in ("SmolLM3", "Llama"):
        save(tmp_path / family, family, rope_parameters={**rope, "rope_theta": 1e4})
        assert describe_transformers(FolderCheckpoint(tmp_path / family)).max_positions == longest
    assert describe(FolderCheckpoint(tmp_path / "Llama")).max_positions == longest


def test_layers_scale_scores_as_they_were_built(made):
    _, backend = loaded(made("gpt2-scaled-by-layer")[0])
    assert [scores.scale for scores in backend.score_scaling] == pytest.approx([1 / 4, 1 / 8, 1 / 12])


def test_a_layer_that_attends_twice_keeps_keys_and_values_twice(made):
    description, _ = loaded(made("diffllama")[0])
    assert len(description.kv_layers) == 2 * SHAPE["num_hidden_layers"]


def test_experts_of_a_token_count_as_activations(made):
    description, _ = loaded(made("olmoe")[0])
    alone, _ = loaded(made("olmo")[0])
    assert description.activations_per_token - alone.activations_per_token == 3 * (2 * 2 * 96 - 96)


def test_long_rope_ends_where_it_would_change_all_sequences_of_a_batch(saved):
    folder, model = saved("phi3-longrope")
    description, backend = loaded(folder)
    assert description.max_positions == 32
    (found,) = Paged(description, backend, [32]).logits([(0, 0, prompt_of(32))])
    expected = model(torch.tensor([prompt_of(32)])).logits[0]
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_description_reads_no_tensors_and_loading_reports_progress(made):
    checkpoint = FolderCheckpoint(made("olmoe")[0])
    read = checkpoint.read
    checkpoint.read = None  # must not be called
    description = describe_transformers(checkpoint)
    checkpoint.read = read
    seen = []
    load_transformers(description, dtype="float32", progress=lambda done, total: seen.append((done, total)))
    total = sum(stored.num_bytes for stored in checkpoint.tensors.values())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert (seen[0], seen[-1]) == ((0, total), (total, total))
    assert len(seen) == len(checkpoint.tensors) + 1
