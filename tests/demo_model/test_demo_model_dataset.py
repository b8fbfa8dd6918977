"""The embedded model's training data is unchanged: facts, wording and determinism."""

import json
import re
from itertools import pairwise
from random import Random

import pytest

from quire.hub import embedded
from quire.tokenizer.tokenizer import Tokenizer
from tools.demo_model import places, world
from tools.demo_model.chats import answer_text
from tools.demo_model.exercises import difference_worked, sum_worked
from tools.demo_model.questions import questions
from tools.demo_model.shop import sentence
from tools.demo_model.stories import tell
from tools.demo_model.vocabulary import FACTS, TOVAN, WORDS, Fact


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(embedded.folder())


def turns(task, num_chats=100, budget=world.BUDGET):
    """(question, answer) of every assistant turn of many chats; the question is the message before the answer."""
    for seed in range(num_chats):
        messages = world.chat(task, Random(seed), budget).messages
        for before, message in pairwise(messages):
            if message["role"] == "assistant":
                yield before["content"], answer_text(message)


def first_text(task, seed, budget=world.BUDGET):
    """The text up to the first answer."""
    messages = world.chat(task, Random(seed), budget).messages
    return "\n".join(m["content"] for m in messages[: 2 if messages[0]["role"] == "system" else 1])


def test_the_catalogue_is_the_one_in_the_weights():
    assert len(FACTS) == 48
    assert FACTS["lamp"] == Fact(price=22, shelf="C7", color="red", caretaker="Ivy")
    assert FACTS["violin"] == Fact(price=51, shelf="E3", color="black", caretaker="Emil")
    assert FACTS["vase"] == Fact(price=24, shelf="A1", color="white", caretaker="June")


def test_tovan_is_the_language_in_the_weights():
    assert len(set(TOVAN.values())) == len(TOVAN) == 100
    known = {"fox": "ketu", "lamp": "zove", "red": "godo", "carries": "veda", "light": "fora", "mole": "fupa"}
    assert known.items() <= TOVAN.items()


def test_tovan_grammar():
    pairs = dict(sentence(Random(seed)) for seed in range(6))
    assert pairs["the mole cleans the heavy drum"] == "fupa tapa guva fuvu"  # verb last, adjective after its noun
    assert pairs["the cat sold the new guitar"] == "lovi fopo bili na fitu"  # "na" marks the past


def test_words_are_all_different():
    assert len(set(WORDS)) == len(WORDS)


@pytest.mark.parametrize("task", world.WEIGHTS)
def test_equal_seeds_give_equal_chats_and_others_differ(task):
    first = [world.chat(task, Random(seed)) for seed in range(20)]
    assert first == [world.chat(task, Random(seed)) for seed in range(20)]
    assert len({str(chat.messages) for chat in first}) > 15


def test_every_task_has_one_weight():
    assert not world.SIZED.keys() & world.FIXED.keys()
    assert world.SIZED.keys() | world.FIXED.keys() == world.WEIGHTS.keys()


@pytest.mark.parametrize("task", world.WEIGHTS)
def test_chats_begin_with_a_question_and_end_with_an_answer(task):
    for seed in range(50):
        roles = [message["role"] for message in world.chat(task, Random(seed)).messages]
        assert roles[-1] == "assistant"
        questions_only = roles[1:] if roles[0] == "system" else roles
        assert set(questions_only[1::2]) == {"assistant"}
        assert set(questions_only[::2]) <= {"user", "tool"}


def test_recall_answers_are_lines_of_the_first_message():
    for seed in range(100):
        text = first_text("recall", seed)
        for message in world.chat("recall", Random(seed)).messages:
            if message["role"] == "assistant":
                assert f"\n{message['content']}\n" in f"{text}\n"


def test_needle_answers_stand_among_the_stories():
    for seed in range(100):
        text = first_text("needle", seed)
        for message in world.chat("needle", Random(seed)).messages:
            if message["role"] == "assistant":
                assert message["content"] in text


def test_exercises_are_what_they_say():
    def words(text):
        return text.split(": ", 1)[1].split()

    assert all(words(question) == answer.split() for question, answer in turns("copy"))
    assert all(words(question) == answer.split()[::-1] for question, answer in turns("reverse"))
    assert all(sorted(words(question)) == answer.split() for question, answer in turns("sort"))


def test_counts_are_the_words_again_with_every_match_numbered():
    for question, answer in turns("count"):
        words = question.split(": ", 1)[1].split()
        counted, result = answer.split(", so ")
        matches = [number for number in counted.split() if number.isdecimal()]
        assert [word for word in counted.split() if not word.isdecimal()] == words
        assert matches == [str(i + 1) for i in range(words.count(question.split()[1]))]
        assert int(result) == len(matches)


def test_sums_and_differences_end_with_the_result():
    for question, answer in turns("add"):
        a, b = map(int, re.findall(r"\d+", question))
        is_difference = "-" in question or "minus" in question
        assert answer.endswith(f", so {a - b if is_difference else a + b}")
        assert a >= b or not is_difference


@pytest.mark.parametrize("work", [sum_worked, difference_worked])
def test_every_column_of_the_working_is_right(work):
    for a in range(100):
        for b in range(100) if work is sum_worked else range(a + 1):
            head, ones, tens = re.fullmatch(r"(.*): (.*), (.*), so \d+", work(a, b)).groups()
            assert head == f"{a:02}{'+' if work is sum_worked else '-'}{b:02}"
            for column in (ones, tens):
                terms, result = column.split("=")
                first, *rest = (int(term) for term in re.findall(r"\d+", terms))
                assert int(result) == (first + sum(rest) if work is sum_worked else first - sum(rest))
            assert int(tens.split("=")[1] + ones.split("=")[1][-1]) == (a + b if work is sum_worked else a - b)


def test_the_working_is_as_on_paper():
    assert sum_worked(47, 38) == "47+38: 7+8=15, 4+3+1=8, so 85"
    assert sum_worked(5, 2) == "05+02: 5+2=7, 0+0+0=0, so 7"
    assert difference_worked(52, 38) == "52-38: 12-8=4, 5-3-1=1, so 14"


def test_the_thoughts_of_a_sum_add_up():
    for question, answer in turns("think_sum"):
        total, *rest = (int(word) for word in question.split()[1:-1])
        thoughts = answer.removeprefix("<think>\n").split("\n</think>\n\n")[0].splitlines()
        for number, thought in zip(rest, thoughts, strict=True):
            assert thought == sum_worked(total, number)
            total += number
        assert answer.endswith(f"\n</think>\n\n{total}")
        assert total < 100


def test_records_hold_the_keys_asked_for_in_that_order():
    for question, answer in turns("extract"):
        sentence_, keys = question.split("\nJSON keys: ")
        record = json.loads(answer)
        assert list(record) == keys.split(", ")
        assert all(str(value) in sentence_ for value in record.values())


def test_tool_calls_fit_a_tool_on_offer():
    for seed in range(100):
        chat = world.chat("tool", Random(seed))
        call = chat.messages[1]["tool_calls"][0]["function"]
        [offered] = [t["function"] for t in chat.tools if t["function"]["name"] == call["name"]]
        assert list(call["arguments"]) == offered["parameters"]["required"]


def test_stories_end_where_the_item_is():
    for seed in range(100):
        story = tell(Random(seed))
        handed = [line for line in story.text.split(". ") if " gave the " in line or " lent " in line]
        assert story.owner in handed[-1] if handed else story.owner == story.hero
        assert story.owner in story.ending


def test_labels_do_not_contradict_each_other():
    for seed in range(100):
        messages = world.chat("classify", Random(seed)).messages
        shown = dict(line.split(" -> ") for line in messages[0]["content"].splitlines())
        known = [tuple(answer["content"].split(" -> ")) for answer in messages[2::2]]
        assert [word for word, _ in known] == [question["content"] for question in messages[1::2]]
        assert all(shown.get(word, label) == label for word, label in known)
        assert {label for _, label in known} <= set(shown.values())


def test_a_budget_makes_chats_longer():
    for task in ("recall", "needle"):
        lengths = {b: sum(len(first_text(task, seed, b)) for seed in range(20)) for b in (230, 1024, 1900)}
        assert lengths[230] < lengths[1024] / 2 < lengths[1900]


def test_mixed_chats_change_subject_and_keep_the_first_one_s_tools():
    for seed in range(50):
        messages = world.mixed(Random(seed), world.BUDGET).messages
        assert [m["role"] for m in messages].count("system") <= 1
        assert all(m["role"] != "system" for m in messages[1:])
    chats = [world.training_chat(Random(seed)) for seed in range(200)]
    assert any("Repeat: " in str(c.messages) and "Translate" in str(c.messages) for c in chats)


def test_questions_are_the_assistant_turns_with_the_true_turns_before_them(tokenizer):
    asked = questions(["facts"], 5, 0, tokenizer)
    prompts = [tokenizer.decode(question.prompt) for question in asked]
    assert sum(prompt.count("<|im_start|>") == 2 for prompt in prompts) == 5  # one first question per chat
    for (before, prompt), question in zip(pairwise(prompts), asked[:-1], strict=True):
        if prompt.count("<|im_start|>") > 2:
            assert prompt.startswith(f"{before}{question.expected}<|im_end|>\n<|im_start|>user\n")
        assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_questions_of_a_task_depend_on_the_seed_and_not_on_the_other_tasks(tokenizer):
    copies = questions(["copy"], 3, 1, tokenizer)
    assert questions(["talk", "copy"], 3, 1, tokenizer)[-3:] == copies
    assert questions(["copy"], 6, 1, tokenizer)[:3] == copies
    assert questions(["copy"], 3, 2, tokenizer) != copies


def test_a_size_makes_prompts_longer(tokenizer):
    usual, long = (questions([task], 20, 0, tokenizer) for task in ("needle", "needle@1024"))
    assert max(q.num_tokens for q in usual) < 230 < min(q.num_tokens for q in long)
    assert 500 < max(q.num_tokens for q in long) < 1024


@pytest.mark.parametrize("task", ["fact", "facts@100", "recall@x", "mixed@100"])
def test_unknown_tasks_and_sizes_are_refused(task, tokenizer):
    with pytest.raises(ValueError, match="recall"):
        questions([task], 1, 0, tokenizer)


def test_the_examples_of_the_page_are_from_this_world():
    page = (places.ROOT / places.PAGE).read_text()
    examples = re.findall(r"^\| (\w+) \| `(.+)` \| `(.+)` \|$", page, re.MULTILINE)
    assert {task for task, _, _ in examples} == set(world.WEIGHTS)
    for task, question, answer in examples:
        true = [first_exchange(task, seed) for seed in range(3)]
        assert any(
            q.endswith(question.removeprefix("...")) and a.startswith(answer.removesuffix("...")) for q, a in true
        )


def first_exchange(task, seed):
    """(text before the first answer, first answer), each on one line."""
    messages = world.chat(task, Random(seed)).messages
    turn = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    before = "\n".join(message["content"] for message in messages[:turn])
    return before.replace("\n", " ↵ "), answer_text(messages[turn]).replace("\n", " ↵ ")
