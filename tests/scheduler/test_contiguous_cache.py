"""The scheduler needs no paging: it runs on a cache that gives each sequence one run of consecutive blocks."""

import random
from inspect import signature

import pytest

from quire.cache.manager import KVCacheManager
from quire.params import BeamSearchParams
from quire.scheduler.beam_search import plan_beams
from tests.rigs.contiguous_cache import ContiguousCache
from tests.rigs.scripted_engine import VOCAB, Rig

LENGTH = 60


def contiguous(config):
    return ContiguousCache(config, 24, LENGTH)  # runs of ended sequences are in use until the steps in flight are over


def rig_with(new_cache, **options):
    return Rig(num_blocks=24 * 15, max_model_len=LENGTH, new_cache=new_cache, **options)


def add_requests(rig):
    rng = random.Random(3)
    for i in range(30):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
        rig.add(str(i), prompt, max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 2]))
    beams = plan_beams(BeamSearchParams(beam_width=3, max_tokens=9), vocab_size=VOCAB, num_end_tokens=1)
    rig.add("beams", [5, 6, 7, 8, 9], max_tokens=9, n=3, beams=beams)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("failing", [False, True])
def test_outputs_are_those_of_the_paged_cache(steps_in_flight, failing):
    def fails(step):  # a sequence that fails alone would end
        return failing and step.id % 7 == 3 and len(step.chunks.rows) > 1

    outputs = []
    for new_cache in (None, contiguous):
        rig = rig_with(new_cache, steps_in_flight=steps_in_flight, fails=fails)
        add_requests(rig)
        rig.run()
        assert rig.num_failures > 3 or not failing
        outputs.append((rig.tokens, rig.reasons))
    assert outputs[0] == outputs[1]
    assert len(outputs[0][0]) > 33


def test_blocks_of_a_sequence_are_consecutive():
    rig = rig_with(contiguous)
    add_requests(rig)
    for _ in range(10):
        rig.step()
        for table in rig.cache.tables.values():
            first = table.blocks[0][0]
            assert table.blocks[0] == list(range(first, first + 15))


def test_the_contiguous_cache_has_every_member_of_the_protocol():
    rig = rig_with(contiguous)
    members = {*KVCacheManager.__annotations__, *(name for name in vars(KVCacheManager) if not name.startswith("_"))}
    assert len(members) > 30
    assert not [name for name in members if not hasattr(rig.cache, name)]
    for name in members:
        if callable(method := getattr(KVCacheManager, name, None)):
            _, *parameters = signature(method).parameters.values()
            needed = [one for one in parameters if one.default is one.empty]
            named = {one.name: None for one in needed if one.kind is one.KEYWORD_ONLY}
            signature(getattr(rig.cache, name)).bind(*[None] * (len(needed) - len(named)), **named)
