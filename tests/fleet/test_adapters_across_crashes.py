"""Adapters of an engine process: a name that changes its content, kills, and files that change."""

import asyncio
import shutil

import msgspec
import pytest
from engine_processes import kill, running, scenario
from waiting import until

from quire.core.request import Request
from quire.errors import ModelError
from quire.params import SamplingParams
from tools.demo_model import places

PROMPTS = [[5 + i, 40, 7 + i, 100, 3, 9] for i in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
STYLES = ("pirate", "json")


def folder_of(style):
    return places.ROOT / places.adapter(style)


async def answer(engine, name, prompt, adapter):
    """The tokens of a request, and its error."""
    stream = await engine.generate([Request(name, prompt, PARAMS, adapter=adapter)])
    tokens, error, reason = [], "", None
    try:
        while reason is None:
            for output in await anext(stream):
                tokens += output.token_ids
                error, reason = output.error, output.finish_reason
    finally:
        stream.close()
    return tokens, error


async def expected_answers(engine, adapters):
    return [
        [(await answer(engine, f"expected {n} {i}", prompt, one))[0] for i, prompt in enumerate(PROMPTS)]
        for n, one in enumerate(adapters)
    ]


def test_each_answer_is_wholly_of_one_version_of_a_name_although_engines_are_killed():
    """64 streams at once, 100 changes of the name, and five kills between them."""

    async def run():
        async with running(enable_lora=True, max_num_seqs=64, max_model_len=128) as engine:
            versions = [await engine.read_adapter("style", str(folder_of(style))) for style in STYLES]
            assert versions[0].digest != versions[1].digest
            wanted = await expected_answers(engine, versions)
            assert all(one != other for one, other in zip(*wanted, strict=True))
            current, checked = 0, [0, 0]

            async def stream(number):
                for turn in range(3):
                    version, which = current, (number + turn) % len(PROMPTS)
                    tokens, error = await answer(engine, f"{number} {turn}", PROMPTS[which], versions[version])
                    assert not error
                    assert tokens == wanted[version][which]
                    checked[version] += 1

            streams = asyncio.gather(*(stream(number) for number in range(64)))
            for change in range(100):
                current = 1 - current
                if change % 20 == 10:
                    await kill(engine)
                due = sum(checked) + 1
                await until(lambda least=due: sum(checked) >= least or streams.done())
            await streams
            assert engine.health().num_restarts == 5
            assert min(checked) > 20

    scenario(run())


def test_requests_of_files_that_changed_fail_alone_after_a_restart(tmp_path):
    """An engine that has the old bytes uses them. One that would have to read them again fails the request by name.

    The new ones are pinned: the next engine loads them before a request asks for them.
    """

    async def run():
        folder = shutil.copytree(folder_of("pirate"), tmp_path / "style")
        async with running(enable_lora=True) as engine:
            old = await engine.read_adapter("style", str(folder))
            before = await answer(engine, "before", PROMPTS[0], old)
            shutil.copy(folder_of("json") / "adapter_model.safetensors", folder)
            assert await answer(engine, "resident", PROMPTS[0], old) == before
            new = await engine.read_adapter("style", str(folder))
            assert new.digest != old.digest
            await engine.pin_adapter(new, pinned=True)
            await kill(engine)
            await until(lambda: engine.health().stats.num_adapters)
            (_, error), other = await asyncio.gather(
                answer(engine, "gone", PROMPTS[0], old), answer(engine, "new", PROMPTS[0], new)
            )
            assert "style" in error
            assert "changed" in error
            assert other[0] != before[0]
            assert not other[1]

    scenario(run())


def test_an_adapter_that_cannot_be_read_is_an_error_of_its_call(tmp_path):
    async def run():
        async with running(enable_lora=True) as engine:
            with pytest.raises(ModelError, match="has no adapter_config"):
                await engine.read_adapter("nothing", str(tmp_path))
            adapter = await engine.read_adapter("pirate", str(folder_of("pirate")))
            missing = msgspec.structs.replace(adapter, path=str(tmp_path), digest="0" * 64)
            _, error = await answer(engine, "missing", PROMPTS[0], missing)
            assert "pirate" in error
            assert (await answer(engine, "others", PROMPTS[0], adapter))[1] == ""

    scenario(run())
