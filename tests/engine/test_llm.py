"""LLM, the offline interface, with the embedded model."""

import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from quire import LLM, CompletionOutput, RequestOutput, SamplingParams
from quire.core.prompt_progress import PromptProgress
from quire.engine.token_progress import TokenProgress
from quire.errors import ConfigError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12)
STORY = "One Tuesday Mira went"


def texts(results):
    return [output.text for result in results for output in result.outputs]


def test_all_forms_of_a_prompt_mean_the_same(llm):
    ids = llm.get_tokenizer().encode(STORY)
    forms = [STORY, ids, list(np.array(ids)), {"prompt": STORY}, {"prompt_token_ids": ids}]
    together = llm.generate(forms, GREEDY)
    assert len(set(texts(together))) == 1
    for form, result in zip(forms, together, strict=True):
        assert isinstance(result, RequestOutput)
        assert isinstance(result.outputs[0], CompletionOutput)
        assert result.prompt_token_ids == ids
        assert texts(llm.generate(form, GREEDY)) == texts([result])
    assert [result.prompt for result in together] == [STORY, None, None, STORY, None]


def test_results_come_in_the_order_of_prompts(llm):
    prompts = [STORY, "Hello", "a kettle"]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 1, 5)]
    results = llm.generate(prompts, params)
    assert [result.prompt for result in results] == prompts
    assert [len(result.outputs[0].token_ids) for result in results] == [9, 1, 5]
    assert all(result.finished and result.outputs[0].finish_reason == "length" for result in results)
    assert llm.generate([]) == []


def test_chat_answers_and_ends(llm):
    conversation = [{"role": "user", "content": "Hello! Who are you?"}]
    (result,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=60))
    assert "Pip" in result.outputs[0].text
    assert "<|im_end|>" not in result.outputs[0].text
    assert result.outputs[0].finish_reason == "stop"
    assert (
        texts(llm.chat([conversation, conversation], SamplingParams(temperature=0, max_tokens=60)))
        == [result.outputs[0].text] * 2
    )
    assert "".join(llm.stream_chat(conversation, SamplingParams(temperature=0, max_tokens=60))) == (
        result.outputs[0].text
    )


def test_a_stop_string_across_tokens(llm):
    (free,) = texts(llm.generate(STORY, SamplingParams(temperature=0, max_tokens=12)))
    stop = free[10:20]
    (result,) = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=12, stop=stop))
    assert result.outputs[0].text == free[: free.index(stop)]
    assert result.outputs[0].stop_reason == stop
    ids = result.outputs[0].token_ids
    decode = llm.get_tokenizer().decode
    assert stop in decode(ids)
    assert stop not in decode(ids[:-1])
    late = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=12, min_tokens=12, stop=stop))
    assert texts(late) == [free]


def test_same_seed_same_text(llm):
    params = SamplingParams(seed=7, max_tokens=20, n=3)
    first, second = texts(llm.generate(STORY, params)), texts(llm.generate([STORY, "other"], [params, GREEDY]))[:3]
    assert first == second
    assert len(set(first)) == 3
    assert texts(llm.generate(STORY, SamplingParams(seed=8, max_tokens=20, n=3))) != first


def test_logprobs_of_greedy_tokens_are_the_highest(llm):
    (result,) = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=6, logprobs=2))
    output = result.outputs[0]
    for token, row in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(row)) == token
        assert row[token].rank == 1
        assert row[token].logprob == max(entry.logprob for entry in row.values())
    assert output.cumulative_logprob == pytest.approx(
        sum(row[t].logprob for t, row in zip(output.token_ids, output.logprobs, strict=True))
    )


@pytest.mark.parametrize(
    "prompts",
    [
        [STORY, []],
        [STORY, [99999]],
        [STORY, [1] * 5000],
        [STORY, "\ud800"],
        [STORY, {"promt": "a"}],
        [STORY, {"prompt": 3}],
        [STORY, {"prompt_token_ids": ["a"]}],
        [STORY, {}],
        [STORY, 3.5],
        3.5,
        "",
    ],
)
def test_a_rejected_call_leaves_no_request_and_no_used_block(llm, prompts):
    with pytest.raises(RequestError):
        llm.generate(prompts, GREEDY)
    assert texts(llm.generate(STORY, GREEDY)) == texts(llm.generate(STORY, GREEDY))
    assert llm.llm_engine.stats().kv_blocks_used == 0
    assert not llm.llm_engine.has_work


def test_as_many_params_as_prompts(llm):
    with pytest.raises(RequestError, match="2 prompts"):
        llm.generate([STORY, STORY], [GREEDY])


def test_an_answer_given_up_frees_its_blocks(llm):
    answer = llm.stream_chat([{"role": "user", "content": "Tell me a story about Mira."}], GREEDY)
    next(answer)
    assert llm.llm_engine.stats().kv_blocks_used > 0
    answer.close()
    llm.llm_engine.step()
    assert llm.llm_engine.stats().kv_blocks_used == 0


def test_progress_is_shown_when_asked_for(llm, capfd):
    llm.generate(STORY, GREEDY)
    assert capfd.readouterr().err == ""
    llm.generate(STORY, GREEDY, use_tqdm=True)
    shown = capfd.readouterr().err
    assert "1/1" in shown
    assert "tokens/s" in shown


def test_progress_moves_while_a_long_prompt_is_computed(monkeypatch, capfd):
    with TokenProgress("generating", 1, shown=True) as bar:
        bar.show_prompts(PromptProgress(1, 64, 200))
    assert "prompt 64 of 200" in capfd.readouterr().err
    shown = []
    monkeypatch.setattr(TokenProgress, "show_prompts", lambda _bar, progress: shown.append(progress))
    ids = [5 + i % 90 for i in range(200)]
    words = {"role": "user", "content": "word " * 190}
    with closing(LLM(memory="256MiB", max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64)) as llm:
        for work in (
            lambda: llm.generate([ids], GREEDY),
            lambda: llm.embed([ids]),
            lambda: list(llm.stream_message([words], GREEDY, on_step=shown.append)),
        ):
            llm.llm_engine.flush_cache()
            shown.clear()
            work()
            moved = list(dict.fromkeys(progress for progress in shown if progress.num_prompts))
            assert [progress.num_done for progress in moved] == [64, 128, 192]
            assert shown[-1].num_prompts == 0


def test_unknown_options_name_the_nearest():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(max_num_seq=3)


def test_control_plane_and_cli_import_no_torch():
    check = "import sys, quire.core.step, quire.cli; assert 'torch' not in sys.modules and 'fastapi' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
    missing = "import quire\ntry: quire.nothing\nexcept AttributeError as error: assert 'nothing' in str(error)"
    subprocess.run([sys.executable, "-c", missing], check=True)


def test_generate_is_rejected_while_a_chat_is_streamed(llm):
    pieces = llm.stream_chat([{"role": "user", "content": "Hello!"}], GREEDY)
    next(pieces)
    with pytest.raises(RequestError, match="still being streamed"):
        llm.generate(STORY, GREEDY)
    pieces.close()
    assert llm.generate(STORY, GREEDY)[0].finished


def test_sampling_params_must_be_sampling_params(llm):
    with pytest.raises(RequestError, match=r"must be SamplingParams\(...\), not dict"):
        llm.generate(STORY, {"temperature": 0})


def test_names_of_other_engines_are_pointed_out():
    with pytest.raises(ConfigError, match="'gpu_memory_utilization' \\(quire calls it 'memory'\\)"):
        LLM(gpu_memory_utilization=0.5)


def test_without_sampling_params_the_models_own_are_taken(llm, monkeypatch):
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_p=0.95, max_tokens=256)
    monkeypatch.setattr(llm, "_sampling_defaults", {"temperature": 0.0, "max_tokens": 5})
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=5)
    conversation = [{"role": "user", "content": "Tell me a story about Mira."}]
    expected = texts(llm.chat(conversation, SamplingParams(temperature=0, max_tokens=5)))
    assert texts(llm.chat(conversation)) == expected == ["".join(llm.stream_chat(conversation))]
    assert texts(llm.generate(STORY)) == texts(llm.generate(STORY, SamplingParams(temperature=0, max_tokens=5)))


def test_a_message_is_continued(llm):
    conversation = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "I am"}]
    (result,) = llm.chat(conversation, GREEDY, continue_final_message=True)
    assert result.prompt.endswith("I am")
    assert texts([result]) == texts(llm.generate({"prompt_token_ids": result.prompt_token_ids}, GREEDY))
    with pytest.raises(RequestError, match="continue_final_message"):
        llm.chat(conversation, GREEDY, continue_final_message=True, add_generation_prompt=True)


def test_a_prompt_is_cut_where_asked(llm):
    ids = llm.get_tokenizer().encode(STORY)
    (result,) = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=5, truncate_prompt_tokens=2))
    assert result.prompt_token_ids == ids[-2:]
    assert result.prompt == llm.get_tokenizer().decode(ids[-2:])
    assert texts([result]) == texts(llm.generate(ids[-2:], SamplingParams(temperature=0, max_tokens=5)))


def test_embedding_shows_progress(llm, capfd):
    llm.embed([STORY, "Hello"], use_tqdm=True)
    shown = capfd.readouterr().err
    assert "embedding" in shown
    assert "2/2" in shown
