"""What of a model's message format applies to a request, and the parameters that follow from it."""

import pytest

from quire.chat.output import constrained_params, output_format
from quire.chat.tools import toolbox
from quire.params import ReasoningParams, SamplingParams, StructuredOutputsParams
from tools.chat_transcripts import TOOLS, chat_format

HARMONY = chat_format("openai", "openai_gptoss")
TURN = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
TAGS = {"begin": "<|channel|>analysis<|message|>", "end": "<|end|><|start|>assistant"}
FINAL = "<|channel|>final<|message|>"
ANY_OBJECT = StructuredOutputsParams(json={"type": "object"})


def params_of(prompt, *, own=HARMONY, tools=None, budget=None, **params):
    format = output_format(own, toolbox(tools), prompt, reasons=True, special_texts=frozenset())
    return constrained_params(format, SamplingParams(**params), budget)


@pytest.mark.parametrize(
    ("prompt", "begun", "answer_begin"),
    [
        (TURN, False, FINAL),
        (TURN + TAGS["begin"], True, FINAL),
        (TURN + FINAL + '{"a"', False, ""),  # a message that is continued
    ],
)
def test_the_constraint_of_gpt_oss_begins_behind_the_header_of_the_final_channel(prompt, begun, answer_begin):
    found = params_of(prompt, structured_outputs=ANY_OBJECT)
    assert found.reasoning == ReasoningParams(**TAGS, begun=begun, answer_begin=answer_begin)


@pytest.mark.parametrize(
    ("prompt", "begun", "answer_begin"),
    [
        ("<|USER_TOKEN|>Hi<|CHATBOT_TOKEN|>", False, "<|START_TEXT|>"),
        ("<|CHATBOT_TOKEN|><|START_THINKING|>", True, "<|START_TEXT|>"),
        ('<|CHATBOT_TOKEN|><|START_TEXT|>{"a"', False, ""),  # a message that is continued
    ],
)
def test_the_constraint_of_command_begins_with_the_tag_of_an_answer(prompt, begun, answer_begin):
    own = chat_format("cohere_command4", "cohere_command4")
    tags = {"begin": "<|START_THINKING|>", "end": "<|END_THINKING|>"}
    found = params_of(prompt, own=own, structured_outputs=ANY_OBJECT)
    assert found.reasoning == ReasoningParams(**tags, begun=begun, answer_begin=answer_begin)


def test_beside_tools_the_tag_of_an_answer_of_command_is_in_the_grammar_without_reasoning():
    prompt = "<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>"
    own = chat_format("cohere_command4", "cohere_command4")
    found = params_of(prompt, own=own, tools=TOOLS, structured_outputs=ANY_OBJECT)
    assert found.reasoning is None
    assert '"<|START_TEXT|>" answer' in found.structured_outputs.grammar


def test_beside_tools_the_header_is_in_the_grammar():
    found = params_of(TURN, tools=TOOLS, structured_outputs=ANY_OBJECT)
    assert found.reasoning.answer_begin == ""
    assert FINAL in found.structured_outputs.grammar
    assert "commentary to=" in found.structured_outputs.grammar


def test_ids_of_kimi_count_the_calls_of_the_conversation():
    """Its model was trained on them, and clients tell calls apart by their ids."""
    format = output_format(
        chat_format("kimi_k2"), toolbox(TOOLS), "", reasons=False, special_texts=frozenset(), num_earlier_calls=3
    )
    assert [format.new_call_id(index, "now") for index in (0, 1)] == ["functions.now:3", "functions.now:4"]


def test_a_budget_alone_has_no_constraint():
    found = params_of(TURN, budget=5)
    assert (found.reasoning.budget, found.structured_outputs) == (5, None)
