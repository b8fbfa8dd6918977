"""Messages between the two processes arrive unchanged, and damaged ones are rejected with their error."""

import random
import tracemalloc
from dataclasses import fields, is_dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_groups import kv_group

from quire.cache.key_report import KeyChanges
from quire.config import CacheConfig, Classification, EngineOptions
from quire.core.adapter import Adapter
from quire.core.explanation import DraftCounts, Explanation, Miss, Preemption
from quire.core.output import EndCause, Output
from quire.core.prompt_progress import PromptProgress
from quire.core.request import Beams, KnownOutput, Namespace, Request
from quire.core.scheduling_params import MAX_PROGRAM_TTL, Program, Retention, SchedulingParams
from quire.core.step import Logprobs, Pooling
from quire.cost.step_time import Calibration, CopySample, CostFigures, DecodeSample, PrefillSample
from quire.engine.engine import EngineStats
from quire.errors import (
    ConfigError,
    ContextLengthExceeded,
    DeadlineUnreachable,
    EngineStopped,
    ModelError,
    QueueFull,
    QuireError,
    RequestError,
)
from quire.models.description import UnknownArchitecture
from quire.models.sentence_transformers import Dense, EmbeddingConfig, LayerNorm, Normalize
from quire.params import NUMBERS, ReasoningParams, RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from quire.scheduler.queue.waiting_queue import MOST_SERVICE
from quire.startup.model_info import ModelInfo
from quire.startup.replica_share import ReplicaShare
from quire.supervisor import protocol
from quire.supervisor import protocol as framing
from quire.supervisor.protocol import Answer, BadFrame, Batch, Failure, FrameReader, Launched

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=4)
NUMBER = st.floats(allow_nan=False)
COUNT = st.integers(0, 2**63 - 1)


def arrays(kind, shape):
    size = int(np.prod(shape))
    return st.binary(min_size=size * np.dtype(kind).itemsize, max_size=size * np.dtype(kind).itemsize).map(
        lambda data: np.frombuffer(data, kind).reshape(shape)
    )


def optional(strategy):
    return st.none() | strategy


def names_of(cls):
    if issubclass(cls, msgspec.Struct):
        return cls.__struct_fields__
    return cls._fields if issubclass(cls, tuple) else [field.name for field in fields(cls)]


def one_of_fields(cls, **strategies):
    """Instances with a strategy for every field. A new field has to be added below."""
    assert set(strategies) == set(names_of(cls))
    return st.builds(cls, **strategies)


FORMS = (
    StructuredOutputsParams(json={"type": "object", "title": "é"}, disable_any_whitespace=True),
    StructuredOutputsParams(json=True, whitespace_pattern=" ?", disable_additional_properties=True),
    StructuredOutputsParams(regex="a+", fast_forward=False),
    StructuredOutputsParams(choice=["a", "b"]),
    StructuredOutputsParams(grammar='root ::= "a"'),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(structural_tag={"type": "structural_tag", "structures": [], "triggers": []}),
)


def params():
    chosen = {
        name: st.integers(low, high) if kind is int else st.floats(low, high)
        for name, (kind, low, high) in NUMBERS.items()
    }
    for name in ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
        chosen[name] = optional(chosen[name])
    words = st.lists(TEXT.filter(bool), max_size=2).map(tuple)
    flags = ("ignore_eos", "deterministic", "include_stop_str_in_output", "skip_special_tokens", "speculation")
    reasoning = one_of_fields(
        ReasoningParams,
        begin=st.just("<think>"),
        end=st.sampled_from(["</think>", "◁/think▷"]),
        begun=st.booleans(),
        budget=optional(st.integers(0, 2**31 - 1)),
        answer_begin=st.sampled_from(["", "<|channel|>final<|message|>"]),
        may_end=st.booleans(),
    )
    repetition = one_of_fields(
        RepetitionDetectionParams,
        max_pattern_size=st.integers(4, 9),
        min_pattern_size=st.integers(0, 4),
        min_count=st.integers(2, 9),
    )
    return one_of_fields(
        SamplingParams,
        **chosen
        | {
            "n": st.integers(1, 3),
            "best_of": optional(st.integers(3, 9)),
            "top_p": st.floats(0.1, 1),
            "repetition_penalty": st.floats(0.1, 2),
            "min_tokens": st.just(0),
            "logprobs": st.integers(0, 128),
            "truncation_side": st.sampled_from(["left", "right"]),
            "truncate_prompt_tokens": optional(st.integers(1, 2**31 - 1)),
            "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
            "allowed_token_ids": optional(IDS.filter(bool).map(tuple)),
            "stop": words,
            "stop_regex": words,
            "bad_words": words,
            "stop_token_ids": IDS.map(tuple),
            "logprob_token_ids": IDS.map(tuple),
            "spaces_between_special_tokens": st.booleans(),
            "structured_outputs": optional(st.sampled_from(FORMS)),
            "reasoning": optional(reasoning),
            "repetition_detection": optional(repetition),
            "prediction": st.none(),
            "logits_processors": st.just(()),
        }
        | dict.fromkeys(("json_schema", "regex", "ebnf"), st.none())  # moved to structured_outputs by the constructor
        | dict.fromkeys(flags, st.booleans()),
    )


def new_requests():
    beams = one_of_fields(
        Beams,
        width=st.integers(1, 128),
        num_candidates=st.integers(1, 256),
        length_penalty=st.floats(-10, 10),
        early_stopping=st.sampled_from([True, False, "never"]),
    )
    retention = one_of_fields(
        Retention,
        priority=st.integers(0, 100),
        ttl=optional(st.floats(0, 1e9)),
        pin=st.booleans(),
    )
    program = one_of_fields(
        Program,
        id=st.just("run 1"),
        branch=st.sampled_from(["", "a/b"]),
        expects_more=st.booleans(),
        ttl=st.floats(0, MAX_PROGRAM_TTL),
    )
    scheduling_params = one_of_fields(
        SchedulingParams,
        priority=st.integers(-(2**31 - 1), 2**31 - 1),
        deadline=optional(st.floats(0.1, 1e9)),
        retention=retention,
        program=optional(program),
    )
    known = one_of_fields(KnownOutput, token_ids=IDS, finished=st.booleans(), cumulative_logprob=NUMBER)
    return one_of_fields(
        Request,
        id=TEXT,
        prompt=IDS,
        params=params(),
        bad_words=st.lists(IDS, max_size=2),
        pooling=st.sampled_from(Pooling),
        namespace=one_of_fields(
            Namespace, tenant=TEXT, salt=TEXT, adapter=TEXT, deterministic=st.booleans(), adapter_start=COUNT
        ),
        beams=optional(beams),
        scheduling_params=scheduling_params,
        known_outputs=st.lists(known, max_size=2),
        resumed=st.booleans(),
        eos_token_ids=st.just((2,)),
        prediction=IDS,
        num_counted=COUNT,
        prerequisites=st.lists(TEXT, max_size=2).map(tuple),
        adapter=optional(adapters()),
        waited=st.floats(0, 1e6),
    )


def adapters():
    ids = st.lists(COUNT, max_size=3).map(tuple)
    return one_of_fields(Adapter, digest=TEXT, name=TEXT, path=TEXT, num_bytes=COUNT, rank=COUNT, invocation_tokens=ids)


SHARE = ReplicaShare(
    1, 2, 2**40, Calibration([PrefillSample(8, 0, 0.25)], [DecodeSample(1, 0.125)], [CopySample(64, 0.5, 0.75)])
)


def options():
    fixed = EngineOptions(
        model="a/b", revision="main", max_model_len=9, memory="0.5", wait_weight=2.0, swap_space="4GiB",
        max_queued_requests=7, calibration=0.0, steps_in_flight=2, threads=3, journal="file", kv_cache_dtype="fp8",
    )  # fmt: skip
    return st.sampled_from([EngineOptions(), fixed])


def shares():
    return one_of_fields(
        ReplicaShare,
        index=COUNT,
        count=COUNT,
        available=optional(COUNT),
        costs=st.sampled_from([None, Calibration(), SHARE.costs]),
        secret=st.binary(max_size=32),
    )


def services():
    return st.dictionaries(TEXT, st.integers(0, MOST_SERVICE), max_size=2)


def commands():
    number = st.integers(0, 2**31)
    return st.one_of(
        one_of_fields(protocol.Begin, options=options(), is_restart=st.booleans(), share=shares()),
        one_of_fields(protocol.Add, number=number, requests=st.lists(new_requests(), max_size=2)),
        one_of_fields(protocol.Abort, request_ids=st.lists(TEXT, max_size=3)),
        one_of_fields(protocol.Finish, seq_id=COUNT, num_tokens=COUNT),
        one_of_fields(protocol.EndProgram, tenant=TEXT, program=TEXT, branch=optional(TEXT)),
        one_of_fields(protocol.ServedElsewhere, service=services()),
        one_of_fields(protocol.Explain, number=number, request_ids=st.lists(TEXT, max_size=3)),
        one_of_fields(protocol.Flush, number=number),
        one_of_fields(protocol.ReadAdapter, number=number, name=TEXT, path=TEXT),
        one_of_fields(protocol.PinAdapter, number=number, adapter=adapters(), pinned=st.booleans()),
        one_of_fields(protocol.AskCosts, number=number),
        one_of_fields(protocol.Close),
    )


def logprobs():
    shapes = st.tuples(st.integers(0, 3), st.integers(1, 3))
    return shapes.flatmap(
        lambda shape: one_of_fields(
            Logprobs, ids=arrays("<i4", shape), values=arrays("<f4", shape), ranks=arrays("<i4", shape[:1])
        )
    )


def outputs():
    return one_of_fields(
        Output,
        request_id=TEXT,
        index=st.integers(0, 127),
        seq_id=COUNT,
        token_ids=IDS,
        end=optional(st.sampled_from(EndCause)),
        stop_token=optional(COUNT),
        logprobs=optional(logprobs()),
        prompt_logprobs=optional(logprobs()),
        pooled=optional(st.integers(1, 5).flatmap(lambda size: arrays("<f4", (size,)))),
        num_cached_tokens=COUNT,
        cumulative_logprob=optional(NUMBER),
        error=TEXT,
        queue_seconds=optional(NUMBER),
        forced=IDS.map(tuple),
        predicted=st.tuples(COUNT, COUNT),
        drafted=IDS.map(tuple),
    )


def stats():
    chosen = {name: COUNT for name in EngineStats.__struct_fields__}
    return one_of_fields(
        EngineStats,
        **chosen
        | {
            "last_step_seconds": NUMBER,
            "step_sizes": st.lists(COUNT, max_size=3).map(tuple),
            "waiting_because": st.just("blocks"),
            "drafts": st.dictionaries(TEXT, st.builds(DraftCounts, COUNT, COUNT, COUNT), max_size=2),
            "accepted_by_place": st.lists(COUNT, max_size=3).map(tuple),
            "prompts": st.builds(PromptProgress, COUNT, COUNT, COUNT),
            "adapter_load_seconds": NUMBER,
            "adapter_requests": st.dictionaries(TEXT, st.tuples(COUNT, COUNT), max_size=2),
        },
    )


COSTS = CostFigures(1.0, 2.0, 3.0, 4.0, None, 5.0)
EXPLANATION = Explanation(
    "a", "t", 1.0, 5, state="finished", miss=Miss(3, 4, "evicted", 2.0, "b"), waited={"step": 1.5},
    preemptions=[Preemption(1.0, 0, "why", 3), Preemption(2.0, 1, "why", 3, 4, "swap", "faster", 5, 6.0, 7.0, 8, 9)],
)  # fmt: skip
FAILURE = Failure("RequestError", "no", "n", [1.5])
FACTS = ModelInfo(
    model_name="m",
    architecture="LlamaForSequenceClassification",
    num_parameters=10,
    weight_bytes=20,
    classification=Classification(("no", "yes"), "softmax"),
    generates=True,
    embedding=EmbeddingConfig(
        3,
        "modules.json",
        Pooling.MAX,
        (Dense("f", 4, 3, True, "Tanh", "projection"), LayerNorm("g", 3), Normalize(3)),  # noqa: FBT003
        normalize=False,
        dimensions=None,
        prompts={"query": "find: "},
        default_prompt="query",
        similarity="dot",
        max_length=8,
    ),
    path="p",
    max_model_len=9,
    vocab_size=8,
    num_end_tokens=1,
    hidden_size=4,
    sampling_defaults={"temperature": 0.6, "top_k": 20},
    options=EngineOptions(model="a", memory="1GiB"),
    cache=CacheConfig(
        16, (kv_group((0, 1), 1, 8, "float32", 9, 64, window=5, num_host_blocks=3),), "radix", ((1, 2), (3,)), "cost"
    ),
)


def news():
    keys = st.lists(st.binary(min_size=32, max_size=33), max_size=2)
    result = st.one_of(st.none(), COUNT, st.just(COSTS), st.just([EXPLANATION]))
    answer = one_of_fields(Answer, number=COUNT, result=result, failure=optional(st.just(FAILURE)))
    launched = one_of_fields(
        Launched, names=optional(st.lists(TEXT, max_size=3)), positions=IDS, predicted_seconds=NUMBER
    )
    batch = one_of_fields(
        Batch,
        outputs=st.lists(outputs(), max_size=2),
        answers=st.lists(answer, max_size=2),
        num_steps=COUNT,
        launched=optional(launched),
        stats=stats(),
        num_counted=st.dictionaries(TEXT, COUNT, max_size=2),
        keys=optional(one_of_fields(KeyChanges, added=keys, removed=keys)),
        service=services(),
    )
    return st.one_of(
        batch,
        one_of_fields(protocol.Pulse, turned=NUMBER),
        one_of_fields(protocol.Report, line=TEXT),
        one_of_fields(protocol.Loading, done=COUNT, total=COUNT),
        one_of_fields(protocol.Ready, facts=st.just(FACTS), share=shares()),
        one_of_fields(protocol.Refused, failure=st.just(FAILURE)),
    )


def assert_same(a, b):
    """Asserts equal values of equal types, except for lists and tuples."""
    if isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    elif isinstance(a, list | tuple) and not hasattr(a, "_fields"):
        assert isinstance(b, list | tuple)
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert type(a) is type(b)
        if isinstance(a, msgspec.Struct) or is_dataclass(a) or hasattr(a, "_fields"):
            for name in names_of(type(a)):
                assert_same(getattr(a, name), getattr(b, name))
        else:
            assert a == b


def carried(message):
    """The content of a frame."""
    (inside,) = FrameReader().feed(protocol.encode_frame(message))
    return inside


def test_every_kind_of_message_is_tried_here():
    assert set(protocol.Commands.__args__[0].__args__) == set(protocol.Command.__subclasses__())
    assert {cls.__name__ for cls in protocol.EngineMessage.__args__} == {
        *("Batch", "Pulse", "Report", "Loading", "Ready", "Refused")
    }


@given(sent=st.lists(commands(), max_size=3))
@settings(max_examples=60)
def test_commands_are_received_as_sent(sent):
    assert_same(protocol.decode_commands(carried(sent)), sent)


@given(sent=news())
@settings(max_examples=100)
def test_events_are_received_as_sent(sent):
    assert_same(protocol.decode_message(carried(sent)), sent)


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63, 2**64 - 1])
def test_seeds_of_64_bits_travel(seed):
    sent = protocol.Add(1, [Request("a", [1], SamplingParams(seed=seed))])
    assert protocol.decode_commands(carried([sent]))[0].requests[0].params.seed == seed


def test_an_unencodable_or_oversized_message_is_an_error_of_the_sender(monkeypatch):
    with pytest.raises(BadFrame, match="surrogate"):
        protocol.encode_frame([protocol.Abort(["\ud800"])])
    monkeypatch.setattr(framing, "MAX_FRAME", 100)
    with pytest.raises(BadFrame, match="longer than the 100"):
        protocol.encode_frame([protocol.Abort(["a" * 100])])


# Damage

LOGPROBS = Logprobs(np.ones((2, 1), np.int32), np.ones((2, 1), np.float32), np.ones(2, np.int32))
OUTPUT = Output(
    "a", 0, 1, [1, 2], EndCause.STOP, 3, LOGPROBS, None, np.ones(3, np.float32), 4, -1.0, "why", 0.5,
)  # fmt: skip
ADD = protocol.Add(
    1,
    [
        Request(
            "a", [1, 2], SamplingParams(logit_bias={3: 1.0}, stop=("x",)), [[1]], Pooling.NONE, Namespace("t"),
            Beams(width=2, num_candidates=4, length_penalty=1.0, early_stopping="never"),
            SchedulingParams(deadline=2.0, retention=Retention(ttl=5.0)),
            [KnownOutput([1], cumulative_logprob=-1.0)], resumed=True,
        )
    ],
)  # fmt: skip
WHOLE = [
    carried(message)
    for message in (
        [protocol.Begin(EngineOptions(), share=SHARE), protocol.Abort(["a"]), protocol.Finish(1, 2)],
        [protocol.Explain(1, ["a"])],
        [ADD, protocol.Flush(2), protocol.AskCosts(3), protocol.Close()],
        Batch([OUTPUT], [Answer(1, COSTS), Answer(2, [EXPLANATION], FAILURE)], 3, Launched(["a"], [4], 0.5),
              EngineStats.zero()),
        protocol.Pulse(1.0),
        protocol.Ready(FACTS, SHARE),
        protocol.Refused(FAILURE),
        protocol.Loading(1, 2),
        protocol.Report("line"),
    )
]  # fmt: skip


def read_either_way(data):
    """Decode as the engine and as the front end do: each gives a message or a bad-frame error."""
    read = 0
    for reader in (protocol.decode_commands, protocol.decode_message):
        try:
            reader(data)
            read += 1
        except BadFrame:
            pass
    return read


@given(data=st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bytes_are_bad_frames(data):
    read_either_way(data)


@pytest.mark.parametrize("place", range(len(WHOLE)))
def test_damaged_messages_are_read_or_bad_frames(place):
    dice, whole = random.Random(place), WHOLE[place]
    assert read_either_way(whole) == 1
    for cut in range(len(whole)):
        assert read_either_way(whole[:cut]) == 0
    assert read_either_way(whole + b"\x00") == 0
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(dice.choice([1, 1, 2, 5])):
            at = dice.randrange(len(data))
            match dice.randrange(3):
                case 0:
                    data[at] ^= 1 << dice.randrange(8)
                case 1:
                    data[at] = dice.choice([0x80, 0x90, 0xC0, 0xC1, 0xC6, 0xCB, 0xD3, 0xDB, 0xDD, 0xDF, 0xFF])
                case 2:
                    other = dice.choice(WHOLE)
                    start = dice.randrange(len(other))
                    data[at : at + dice.randrange(9)] = other[start : start + dice.randrange(30)]
            if not data:
                break
        read_either_way(bytes(data))


NESTED = b"\x91" * 10_000_000 + b"\xc0"  # deeper than the C stack
TO_POOLED = b"\x96\xa5Batch\x91\x9b\xa1a\x00\x00\x90\xc0\xc0\xc0\xc0"  # a batch, up to an output's pooled states


@pytest.mark.parametrize(
    "data",
    [
        NESTED,
        b"\x91\x82\xa4type\xa5Close\xa1x" + NESTED,  # in a skipped field
        TO_POOLED + NESTED,  # in a decoded field
        *(head + b"\xff\xff\xff\xff" for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9", b"\x91\xdd")),
        b"\x91\x82\xa4type\xa5Abort\xabrequest_ids\xdd\xff\xff\xff\xff",
        *(TO_POOLED + more + b"\xff\xff\xff\xff" for more in (b"\xdd", b"\xdf", b"\xc6")),
        TO_POOLED + b"\x93\xa3<f4\x92\xce\x7f\xff\xff\xff\xce\x7f\xff\xff\xff\xc4\x00",  # a huge shape, and no data
        TO_POOLED + b"\x93\xa2|O\x91\x01\xc4\x08" + b"\x00" * 8,  # an array of Python objects
        TO_POOLED + b"\x93\x90\x91\x01\xc4\x00",  # a type that is a list
        TO_POOLED + b"\x93\xa3<f4" + b"\xdc\x00\x64" + b"\x01" * 100 + b"\xc4\x04" + b"\x00" * 4,  # 100 dimensions
        TO_POOLED + b"\x07",
    ],
)
def test_announced_sizes_and_nesting_cost_nothing(data):
    tracemalloc.start()
    try:
        assert read_either_way(data) == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**23


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0}, {"n": 1000}, {"temperature": -1.0}, {"top_p": 0.0}, {"stop": [""]}, {"logit_bias": {"1": 1000.0}},
        {"logprobs": 10**6}, {"unknown": 1},
    ],
)  # fmt: skip
def test_out_of_bounds_values_are_rejected_by_the_engine_process(wrong):
    fine = msgspec.to_builtins(ADD.requests[0].params)
    request = {"id": "a", "prompt": [1], "params": {**fine, **wrong}}
    data = msgspec.msgpack.encode([{"type": "Add", "number": 1, "requests": [request]}])
    if "unknown" in wrong:
        assert protocol.decode_commands(data)[0].requests[0].params == ADD.requests[0].params
        return
    with pytest.raises(BadFrame, match="cannot be read"):
        protocol.decode_commands(data)


# Errors


def returned(error):
    (answer,) = protocol.decode_message(
        carried(Batch([], [Answer(1, failure=protocol.encode_error(error))], 0, None, EngineStats.zero()))
    ).answers
    return protocol.decode_error(answer.failure)


@pytest.mark.parametrize(
    "error",
    [
        RequestError("no", "n"),
        RequestError("no"),
        ContextLengthExceeded("too long", "prompt"),
        DeadlineUnreachable(1.25, 1 / 3),
        QueueFull("full", 2.5),
        QueueFull("full", 2.5, 0.25),
        ConfigError("options"),
        ModelError("files"),
        QuireError("else"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_received_with_their_fields(error):
    came = returned(error)
    assert type(came) is type(error)
    assert str(came) == str(error)
    assert came.__dict__ == error.__dict__


@pytest.mark.parametrize(
    ("error", "kind"),
    [(UnknownArchitecture("new"), ModelError), (BadFrame("bad"), QuireError), (EngineStopped("gone"), QuireError)],
)
def test_special_errors_are_received_as_their_base_types(error, kind):
    came = returned(error)
    assert type(came) is kind
    assert str(came) == str(error)


@pytest.mark.parametrize("error", [ValueError("a bug"), MemoryError(), KeyError("x")])
def test_other_errors_are_received_as_internal_errors_with_their_name(error):
    came = returned(error)
    assert type(came) is RuntimeError
    assert str(came) == f"{type(error).__name__}: {error}"


def test_a_failure_that_lacks_its_numbers_is_still_an_error():
    assert "DeadlineUnreachable" in str(protocol.decode_error(Failure("DeadlineUnreachable", "late")))
    assert "QueueFull" in str(protocol.decode_error(Failure("QueueFull", "full", None, [1.0, 2.0, 3.0])))
