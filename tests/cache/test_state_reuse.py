"""Snapshots of recurrent states, through the engine: how much of a prompt is not computed again, to the token."""

import random

import pytest
from scripted_engine import VOCAB, Rig

from quire.runner.scripted_runner import script

TURN_END = VOCAB - 1
BLOCK_SIZE = 16
CHUNK = 512  # most tokens of a step
INDEXES = pytest.mark.parametrize("prefix_index", ["radix", "hash"])
CASES = pytest.mark.parametrize(
    ("num_common", "num_own", "prefix_index", "together"),
    [
        (1500, 700, "radix", False),
        (1500, 700, "hash", True),
        (1600, 600, "radix", True),
        (1600, 600, "hash", False),
        (6476, 1296, "radix", True),
        (6476, 1296, "hash", False),
        (1024, 1024, "radix", False),
        (1024, 1024, "hash", True),
        (2048, 512, "radix", True),
        (2048, 512, "hash", False),
    ],
)


def words(rng: random.Random, count: int) -> list[int]:
    """Random tokens, none of which ends a turn."""
    return [rng.randrange(TURN_END) for _ in range(count)]


def hybrid(prefix_index: str, **options) -> Rig:
    """An engine over a model with recurrent states, and memory for everything."""
    settings = {"num_blocks": 6000, "max_model_len": 8192, "states": 160, "max_num_batched_tokens": CHUNK}
    return Rig(block_size=BLOCK_SIZE, prefix_index=prefix_index, turn_ends=(TURN_END,), **(settings | options))


def ask(rig: Rig, prompts: list[list[int]], *, together: bool = False) -> list[int]:
    """Cached tokens of each prompt. The outputs must be those of a runner that computes everything."""
    for i, prompt in enumerate(prompts):
        rig.add(str(i), prompt, max_tokens=3)
        if not together:
            rig.run()
    rig.run()
    for i, prompt in enumerate(prompts):
        assert rig.tokens[str(i), 0] == script(prompt, 3, VOCAB, has_states=True)
    return [rig.cached[str(i), 0] for i in range(len(prompts))]


def usable(num_tokens: int, prefix_index: str) -> int:
    """Of `num_tokens` equal tokens: all, or whole blocks where the index shares no others."""
    return num_tokens if prefix_index == "radix" else num_tokens - num_tokens % BLOCK_SIZE


@CASES
def test_a_common_prefix_is_cached_from_the_third_prompt_on(num_common, num_own, prefix_index, together):
    rng = random.Random(num_common)
    common = words(rng, num_common)
    cached = ask(hybrid(prefix_index), [common + words(rng, num_own) for _ in range(4)], together=together)
    assert cached == [0, 0, *2 * [usable(num_common, prefix_index)]]


@CASES
def test_a_system_prompt_that_ends_a_turn_is_cached_from_the_second_prompt_on(
    num_common, num_own, prefix_index, together
):
    rng = random.Random(num_common)
    common = [*words(rng, num_common - 1), TURN_END]
    cached = ask(hybrid(prefix_index), [common + words(rng, num_own) for _ in range(3)], together=together)
    assert cached == [0, *2 * [usable(num_common, prefix_index)]]


@pytest.mark.parametrize(
    ("prefix_index", "has_turns", "steps_in_flight"), [("radix", False, 2), ("hash", True, 1)], ids=["plain", "chat"]
)
def test_64_prompts_of_1500_common_and_700_own_tokens(prefix_index, has_turns, steps_in_flight):
    rng, rig = random.Random(64), hybrid(prefix_index, steps_in_flight=steps_in_flight)
    common = [*words(rng, 1499), TURN_END] if has_turns else words(rng, 1500)
    cached = ask(rig, [common + words(rng, 700) for _ in range(64)], together=True)
    first = 1 if has_turns else 2
    least = 1500 if prefix_index == "radix" else 1488
    assert cached[:first] == first * [0]
    assert all(least <= number < least + 4 for number in cached[first:]), "some own tokens are equal by chance"


@INDEXES
@pytest.mark.parametrize("num_header", [3, BLOCK_SIZE + 3])
@pytest.mark.parametrize("num_thoughts", [0, 60])
def test_a_chat_whose_reasoning_is_dropped_reuses_all_up_to_its_last_user_message(
    prefix_index, num_thoughts, num_header
):
    rng, rig = random.Random(5), hybrid(prefix_index)
    chat, behind_user = [*words(rng, 333), TURN_END], 0
    for turn in range(4):
        chat += [*words(rng, 50 + 23 * turn), TURN_END]
        last_user, behind_user = behind_user, len(chat)
        chat += words(rng, num_header)  # of the answer
        rig.add(str(turn), chat, max_tokens=num_thoughts + 20, ignore_eos=True)
        rig.run()
        assert rig.cached[str(turn), 0] == usable(last_user, prefix_index), turn
        chat = [*chat, *words(rng, 20), TURN_END]  # the answer without its reasoning


@INDEXES
def test_a_chat_that_keeps_its_answers_reuses_all_that_was_computed(prefix_index):
    rng, rig = random.Random(6), hybrid(prefix_index)
    chat, behind_user, num_computed = [*words(rng, 333), TURN_END], 0, 0
    for turn in range(4):
        chat = [*chat, *words(rng, 57), TURN_END]
        rig.add(str(turn), chat, max_tokens=37)
        rig.run()
        # a state at the end of an answer is within a block, where only the tree can continue
        reusable = num_computed if prefix_index == "radix" else usable(behind_user, prefix_index)
        assert rig.cached[str(turn), 0] == reusable, turn
        behind_user = len(chat)
        chat = chat + rig.tokens[str(turn), 0]
        num_computed = len(chat) - 1


@INDEXES
def test_a_prefix_that_is_shorter_than_a_block_is_computed_again(prefix_index):
    rng = random.Random(7)
    common = words(rng, BLOCK_SIZE - 1)
    assert ask(hybrid(prefix_index), [common + words(rng, 20) for _ in range(4)]) == [0, 0, 0, 0]
