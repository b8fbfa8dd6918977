"""Training of the embedded model: rows, schedule, optimizer, and resumption of interrupted runs."""

from collections import Counter
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from random import Random

import pytest
import torch
from rich.console import Console
from torch.nn import Parameter

from quire.hub import embedded
from tools.demo_model import base, layout, world
from tools.demo_model.chats import segments
from tools.demo_model.muon import Muon, orthogonal
from tools.demo_model.network import Network, Shape
from tools.demo_model.packing import ANSWER, PROMPT, batch, chat_pieces, world_text
from tools.demo_model.plan import Plan
from tools.demo_model.tokens import SPECIAL, TAGS, train_tokenizer

TINY = Shape(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
SHORT = Plan(tokens=10 * 512, tokens_per_step=512, lengths=((128, 0.5), (256, 0.5)), warm_up_steps=2, seed=3)
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def tokenizer():
    return layout.read_tokenizer(embedded.folder())


def run(plan, tokenizer, file, seed=0):
    torch.manual_seed(seed)
    network = Network(TINY)
    return network, base.run_of(network, plan, tokenizer, file, is_compiled=False)


def test_a_scaled_run_shorter_than_a_row_has_one_step_of_one_row():
    assert SHORT.scaled(0.5, 7) == replace(SHORT, tokens=5 * 512, seed=7)
    shortest = SHORT.scaled(0.01, 7)
    assert (shortest.num_steps, shortest.tokens_per_step, shortest.row_length(0)) == (1, 128, 128)


def test_equal_seeds_give_equal_tokenizers():
    first, second, other = (train_tokenizer(seed, vocab_size=600, num_chats=50) for seed in (0, 0, 1))
    assert first.to_str() == second.to_str() != other.to_str()
    assert first.get_vocab_size() == 600


def test_the_tokenizer_keeps_digits_apart_and_tags_whole():
    tokenizer = train_tokenizer(0, vocab_size=600, num_chats=50)
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2]
    assert tokenizer.encode("2048").tokens == ["2", "0", "4", "8"]
    for token in SPECIAL + TAGS:
        assert tokenizer.encode(f"a{token}b").tokens == ["a", token, "b"]
    assert tokenizer.decode(tokenizer.encode("Ünïcode 🦊\n").ids) == "Ünïcode 🦊\n"


def test_rows_are_full_and_targets_are_what_comes_next(tokenizer):
    made = batch(Random(0), 3, 200, world_text, tokenizer)
    assert made.ids.shape == made.targets.shape == made.weights.shape == (3, 200)
    assert (made.ids[:, 1:] == made.targets[:, :-1]).all()
    again, other = (batch(Random(seed), 3, 200, world_text, tokenizer) for seed in (0, 1))
    assert (made.ids == again.ids).all()
    assert not (made.ids == other.ids).all()


def test_the_tokens_that_count_fully_are_the_answers(tokenizer):
    chat = world.chat("facts", Random(0))
    length = sum(len(tokenizer.encode(piece.text).ids) for piece in chat_pieces(chat))
    made = batch(Random(0), 1, length, lambda *_: chat_pieces(chat), tokenizer)
    written = tokenizer.decode(made.targets[made.weights == ANSWER].tolist(), skip_special_tokens=False)
    assert written == "".join(segment.text for segment in segments(chat) if segment.is_answer)
    assert {round(weight, 3) for weight in made.weights[0, :-1].tolist()} == {ANSWER, PROMPT}


def test_most_long_rows_begin_with_a_long_text(tokenizer):
    budgets = []

    def reading(rng, budget):
        budgets.append(budget)
        return world_text(rng, world.BUDGET)

    for seed in range(30):
        batch(Random(seed), 1, 1024, reading, tokenizer)
    assert 10 < sum(512 <= budget <= 1024 for budget in budgets) < 30
    assert set(budgets) - set(range(512, 1025)) == {world.BUDGET}


def test_long_budgets_go_to_tasks_that_look_far_back():
    is_lookup = Counter(
        world.training_chat(Random(seed), 1000).messages[0]["content"][:7] == "Ledger:" for seed in range(50)
    )
    assert is_lookup[True] > 10


def test_a_plan_takes_every_length_for_its_share():
    plan = Plan(tokens=1000 * 4096, lengths=((256, 0.6), (1024, 0.3), (2048, 0.1)))
    lengths = Counter(plan.row_length(step) for step in range(plan.num_steps))
    assert lengths == {256: 600, 1024: 300, 2048: 100}
    assert plan.num_steps * plan.tokens_per_step >= plan.tokens > (plan.num_steps - 1) * plan.tokens_per_step


def test_the_pace_rises_holds_and_falls():
    plan = Plan(tokens=1000 * 4096, warm_up_steps=10, hold=0.5, lowest=0.1)
    paces = [plan.pace(step) for step in range(plan.num_steps)]
    assert paces[0] == pytest.approx(0.1)
    assert set(paces[10:500]) == {1.0}
    assert all(before >= after for before, after in pairwise(paces[500:]))
    assert paces[750] == pytest.approx(0.5)
    assert paces[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 16, 48), (2, 48, 16)])
def test_orthogonal_matrices_keep_their_directions_and_lose_their_lengths(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonal(matrices)
    assert torch.linalg.svdvals(result).sub(0.95).abs().max() < 0.35
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    assert (result - u @ vh).abs().mean() < 0.1


def test_muon_treats_matrices_of_one_shape_as_if_they_were_alone():
    generator = torch.Generator().manual_seed(0)
    values, gradients = torch.randn(2, 3, 8, 16, generator=generator)
    together = [Parameter(value.clone()) for value in values]
    alone = [Parameter(value.clone()) for value in values]
    optimizers = [Muon([{"params": together}], 0.1), *(Muon([{"params": [matrix]}], 0.1) for matrix in alone)]
    for _ in range(2):
        for matrix, gradient in zip(together + alone, [*gradients, *gradients], strict=True):
            matrix.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    for matrix, other, value in zip(together, alone, values, strict=True):
        torch.testing.assert_close(matrix, other, rtol=0, atol=1e-2)
        assert not torch.equal(matrix, value)


def test_training_lowers_the_loss(tokenizer, tmp_path):
    _, made = run(replace(SHORT, tokens=40 * 512), tokenizer, tmp_path / "run.safetensors")
    losses = [made.step(step) for step in range(40)]
    assert losses[0] > 7
    assert sum(losses[-5:]) / 5 < 6


def test_equal_seeds_give_equal_weights_and_others_do_not(tokenizer, tmp_path):
    weights = []
    for name, plan in (("a", SHORT), ("b", SHORT), ("c", replace(SHORT, seed=4))):
        network, made = run(plan, tokenizer, tmp_path / f"{name}.safetensors")
        made.train(QUIET)
        weights.append(network.embed_tokens.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(tokenizer, tmp_path):
    whole, made = run(SHORT, tokenizer, tmp_path / "whole.safetensors")
    made.train(QUIET)
    file = tmp_path / "broken.safetensors"
    _, made = run(replace(SHORT, tokens=4 * 512), tokenizer, file)
    for step in range(4):  # the first steps of the long plan, saved as `train` does
        replace(made, plan=SHORT).step(step)
    made.save(4)
    resumed, made = run(SHORT, tokenizer, file, seed=9)  # with other initial weights: all state must come from the file
    made.train(QUIET)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_a_finished_run_is_not_trained_again(tokenizer, tmp_path):
    network, made = run(SHORT, tokenizer, tmp_path / "run.safetensors")
    made.train(QUIET)
    before = network.embed_tokens.weight.clone()
    made.train(QUIET)
    assert torch.equal(network.embed_tokens.weight, before)


def test_the_checkpoint_of_another_seed_is_refused(tokenizer, tmp_path):
    _, made = run(SHORT, tokenizer, tmp_path / "run.safetensors")
    made.train(QUIET)
    _, other = run(replace(SHORT, seed=4), tokenizer, made.file)
    with pytest.raises(ValueError, match="seed 3, not 4"):
        other.train(QUIET)


def test_a_log_says_how_a_run_goes(tokenizer, tmp_path):
    console = Console(record=True, file=StringIO(), width=100)
    _, made = run(replace(SHORT, tokens=60 * 512), tokenizer, tmp_path / "run.safetensors")
    made.train(console)
    assert "run: 0.03 M tokens, loss " in console.export_text()
