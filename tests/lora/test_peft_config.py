"""Fields of adapter_config.json: which are read, ignored or refused, and that they select modules as in PEFT."""

import dataclasses
import itertools
import json
import time
from pathlib import Path

import pytest
from peft_adapters import peft

from quire.errors import AdapterError
from quire.lora.peft_config import READ, REFUSED, WITHOUT_EFFECT, read_config

PATH = Path("folder/adapter_config.json")
VOCAB = 301


def read(values=None, **fields):
    values = {"peft_type": "LORA", "target_modules": ["q_proj"], **fields} if values is None else values
    return read_config(json.dumps(values).encode(), PATH, VOCAB)


def test_every_field_of_peft_is_read_ignored_or_refused():
    known = [*READ, *WITHOUT_EFFECT, *REFUSED]
    assert len(known) == len(set(known))
    assert set(known) == {field.name for field in dataclasses.fields(peft.LoraConfig)}


def test_defaults_are_those_of_peft():
    config, theirs = read(), peft.LoraConfig()
    assert (config.rank, config.alpha) == (theirs.r, theirs.lora_alpha)
    assert config.scale_of("q_proj") == theirs.lora_alpha / theirs.r
    assert read(values=json.loads(json.dumps(theirs.to_dict() | {"target_modules": ["x"]}, default=str))).rank == 8


NOT_PLAIN = [
    ("use_dora", True),
    ("modules_to_save", ["score"]),
    ("trainable_token_indices", [3]),
    ("trainable_token_indices", {"embed_tokens": [3]}),
    ("target_parameters", ["mlp.experts.gate_up_proj"]),
    ("layer_replication", [[0, 2], [1, 3]]),
    ("use_qalora", True),
    ("use_bdlora", {"nblocks": 2}),
    ("megatron_config", {"a": 1}),
    ("loftq_config", {"loftq_bits": 4}),
    ("kasa_config", {"beta": 1}),
    ("velora_config", {"num_groups": 64}),
    ("monteclora_config", {"num_samples": 8}),
    ("arrow_config", {"top_k": 3}),
    ("bias", "all"),
    ("bias", "lora_only"),
    ("peft_type", "IA3"),
    ("task_type", "TRANSLATION"),
    *(("init_lora_weights", name) for name in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")),
    ("init_lora_weights", "mica"),
    ("rank_dropouts", {"q_proj": 0.5}),
]


@pytest.mark.parametrize(("field", "value"), NOT_PLAIN)
def test_what_is_not_plain_lora_is_refused_by_name(field, value):
    with pytest.raises(AdapterError, match=rf"adapter_config\.json: .*{field}"):
        read(**{field: value})


def test_every_refused_field_has_a_case():
    assert set(REFUSED) <= {field for field, _ in NOT_PLAIN}


@pytest.mark.parametrize(
    "fields",
    [
        {name: False for name in REFUSED},
        {name: None for name in (*REFUSED, *WITHOUT_EFFECT, "bias", "init_lora_weights", "r", "lora_alpha")},
        {"new_field": None, "another": [], "merge_weights": False},
        {"task_type": "SEQ_CLS", "modules_to_save": [], "layers_pattern": ""},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}, "lora_dropout": 0.5, "inference_mode": True},
    ],
)
def test_fields_that_change_nothing_are_accepted(fields):
    assert read(**fields).scale_of("q_proj") == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 0},
        {"r": "8"},
        {"r": True},
        {"r": 10**30},
        {"lora_alpha": "16"},
        {"lora_alpha": [16]},
        {"target_modules": 7},
        {"target_modules": [7]},
        {"target_modules": []},
        {"target_modules": {"q_proj": 1}},
        {"exclude_modules": [None]},
        {"exclude_modules": "("},
        {"target_modules": "[a-"},
        {"target_modules": "a{1,99999999999}"},
        {"layers_to_transform": "0"},
        {"layers_to_transform": [0.5]},
        {"layers_to_transform": [True]},
        {"layers_pattern": "layers"},
        {"layers_pattern": 3, "layers_to_transform": 1},
        {"target_modules": ".*", "layers_to_transform": 1},
        {"rank_pattern": [1]},
        {"rank_pattern": {"q_proj": 0}},
        {"rank_pattern": {"q_proj": None}},
        {"rank_pattern": {"q_proj": 2.5}},
        {"alpha_pattern": {"q_proj": "2"}},
        {"alpha_pattern": {"(": 2}},
        {"use_rslora": 1},
        {"lora_bias": "yes"},
        {"bias": []},
        {"peft_type": None},
        {"peft_type": ["LORA"]},
        {"task_type": 3},
        {"init_lora_weights": 3},
        {"alora_invocation_tokens": []},
        {"alora_invocation_tokens": 5},
        {"alora_invocation_tokens": [1] * 1025},
        {"alora_invocation_tokens": [VOCAB]},
        {"alora_invocation_tokens": [-1]},
        {"alora_invocation_tokens": [1.5]},
        {"alora_invocation_tokens": [True]},
    ],
)
def test_wrong_values_are_refused_by_name(fields):
    with pytest.raises(AdapterError, match=rf"adapter_config\.json: .*({'|'.join(fields)})"):
        read(**fields)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"\xff\xfe", b'{"r": ' + b"9" * 5000 + b"}", b"[" * 200_000, b"null"]
)
def test_what_is_no_json_object_is_refused(text):
    with pytest.raises(AdapterError, match=r"adapter_config\.json (is not valid JSON|must hold a JSON object)"):
        read_config(text, PATH, VOCAB)


def test_numbers_that_are_not_finite_or_too_large_for_kernels_are_refused():
    for number in ("NaN", "Infinity", "1e999", "-1e10"):
        text = '{"peft_type": "LORA", "target_modules": ["a"], "lora_alpha": ' + number + "}"
        with pytest.raises(AdapterError, match="lora_alpha must be a number of at most"):
            read_config(text.encode(), PATH, VOCAB)


SLOW = [r"(a+)+", r"(a*)*b", r"((a|aa))+x", r"(?:a|a)*b", r"([ab]+c?)*d", r"(a{1,9}){1,9}{2}", r".*.*.*.*.*.*.*.*.*.*b"]


@pytest.mark.parametrize("pattern", [*SLOW, r"(?x)(a+ #)" + "\n" + r")+b", r"(?#[)(a+)+]", "a" * 5000])
@pytest.mark.parametrize(
    "field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern"]
)
def test_patterns_whose_matches_may_take_long_are_refused(field, pattern):
    value = {pattern: 3} if field.endswith("k_pattern") or field.startswith("alpha") else pattern
    with pytest.raises(AdapterError, match=r"may take long|has a comment"):
        read(**{field: value}, layers_to_transform=1) if field == "layers_pattern" else read(**{field: value})


UNSLOTH = (
    r"(?:.*?(?:vision|image|visual|patch_embed|language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
    r".*?(?:\bq_proj\b|\bk_proj\b|\bgate_proj\b).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|"
    r"feed_forward|ffn|dense)\.(?:(?:q_proj|k_proj|gate_proj)))"
)
MODULES = [
    *(f"model.layers.{n}.self_attn.{p}_proj" for n, p in itertools.product((0, 1, 11), "qkvo")),
    *(f"model.layers.{n}.mlp.{p}_proj" for n, p in itertools.product((0, 1, 11), ("gate", "up", "down"))),
    *("transformer.h.0.attn.c_attn", "transformer.h.10.mlp.c_proj", "model.layers.1.mlp.experts.0.up_proj"),
    *("model.language_model.layers.1.self_attn.q_proj", "lm_head", "layers.1.mlp.up_proj", "q_proj", "xq_proj"),
]
SELECTIONS = [
    {"target_modules": ["q_proj", "v_proj", "lm_head"]},
    {"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.up_proj", "c_attn"]},
    {"target_modules": ["proj", "q_pro", "roj"]},
    {"target_modules": r".*\.(q|k)_proj"},
    {"target_modules": r"q_proj"},
    {"target_modules": r"model\.layers\.1.*"},
    {"target_modules": UNSLOTH},
    {
        "target_modules": ["q_proj", "up_proj"],
        "exclude_modules": ["layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"],
    },
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*layers\.1\..*"},
    {"target_modules": ["q_proj"], "exclude_modules": "q_proj"},
    {"target_modules": ["q_proj", "c_attn", "up_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "c_attn", "up_proj"], "layers_to_transform": 0},
    {"target_modules": ["q_proj", "model.layers.0.self_attn.v_proj"], "layers_to_transform": [1, 11]},
    {"target_modules": ["q_proj", "c_attn", "up_proj"], "layers_to_transform": [0, 1], "layers_pattern": "h"},
    {"target_modules": ["q_proj", "c_attn"], "layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["q_proj", "c_proj"], "layers_to_transform": [0, 10], "layers_pattern": []},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
]


@pytest.mark.parametrize("fields", SELECTIONS)
def test_modules_are_selected_as_in_peft(fields):
    from peft.tuners.tuners_utils import check_target_module_exists  # noqa: PLC0415

    config, theirs = read(**fields), peft.LoraConfig(**fields)
    for module in MODULES:
        expected = check_target_module_exists(theirs, module)
        expected = bool(expected) and type(expected).__name__ != "_ExcludedModule"
        assert config.is_target(module) == expected, module


@pytest.mark.parametrize(
    "patterns",
    [
        {"q_proj": 3},
        {"^model.layers.0.self_attn.q_proj": 5, "q_proj": 3},
        {"q_proj": 3, "^model.layers.0.self_attn.q_proj": 5},
        {r"layers\.(0|1)\.mlp\..*": 6, "up_proj": 7},
        {r"layers.1": 9, "a|xq_proj|k_proj": 4},
        {"model.layers.11.mlp.down_proj": 2},
    ],
)
def test_patterns_of_ranks_and_alphas_are_matched_as_in_peft(patterns):
    from peft.utils.other import get_pattern_key  # noqa: PLC0415

    config = read(r=8, lora_alpha=16, rank_pattern=patterns, alpha_pattern={key: 2 * n for key, n in patterns.items()})
    for module in MODULES:
        rank = patterns.get(get_pattern_key(patterns, module), 8)
        assert config.rank_of(module) == rank
        assert config.scale_of(module) == 2
    assert read(r=16, lora_alpha=8, use_rslora=True).scale_of("x") == 2


def test_names_without_matrices_are_found_unless_they_are_excluded():
    config = read(target_modules=["q_proj", "k_proj", "mlp.up_proj"], exclude_modules=["k_proj"])
    assert config.names_without(["model.layers.0.self_attn.q_proj", "up_proj"]) == ["mlp.up_proj"]
    assert read(target_modules="all-linear").names_without([]) == []


def test_many_patterns_of_an_adapter_with_a_rank_per_module_are_fast():
    modules = [f"model.layers.{n}.self_attn.{p}_proj" for n in range(80) for p in "qkvo"]
    config = read(rank_pattern={module: 1 + n % 9 for n, module in enumerate(modules)}, target_modules="all-linear")
    begin = time.process_time()
    assert [config.rank_of(module) for module in modules] == [1 + n % 9 for n in range(len(modules))]
    assert time.process_time() - begin < 2
    with pytest.raises(AdapterError, match="rank_pattern has 5000 entries"):
        read(rank_pattern={f"x{n}": 1 for n in range(5000)})
