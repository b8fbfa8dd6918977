"""Export of the trained model: transformers reads the same text, token ids and logits."""

from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.hub import embedded
from tools.demo_model import forced, layout, places, world
from tools.demo_model.chats import END_OF_TURN, Chat, answer_text, user
from tools.demo_model.engines import with_transformers
from tools.demo_model.network import Network, Shape
from tools.demo_model.packing import chat_pieces

SMALL = Shape(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def written(tmp_path):
    torch.manual_seed(0)
    layout.write(tmp_path, Network(SMALL), layout.read_tokenizer(embedded.folder()))
    return tmp_path


def chats(number):
    return [world.training_chat(Random(seed)) for seed in range(number)]


def test_a_written_network_is_the_same_in_transformers(written):
    layout.verify(written, chats(5))


def test_a_written_network_can_be_read_back(written):
    network = layout.read(written)
    assert network.shape == SMALL
    torch.manual_seed(0)
    for name, weight in Network(SMALL).state_dict().items():
        assert torch.equal(weight.bfloat16().float(), network.state_dict()[name])


def test_other_logits_would_be_noticed(written, monkeypatch):
    right = layout.read

    def wrong(folder):
        network = right(folder)
        with torch.no_grad():
            network.layers[1].self_attn.q_norm.weight[0] += 0.5
        return network

    monkeypatch.setattr(layout, "read", wrong)
    with pytest.raises(ValueError, match="logits differ"):
        layout.verify(written, chats(5))


def test_another_template_would_be_noticed(written):
    file = written / "tokenizer_config.json"
    file.write_text(file.read_text().replace("tool_response>", "answer>"))
    with pytest.raises(ValueError, match="renders"):
        layout.verify(written, [world.chat("tool", Random(seed)) for seed in range(5)])


@pytest.mark.parametrize("folder", [places.BASE, places.DRAFT], ids=str)
def test_the_shipped_models_are_as_they_were_written(folder):
    layout.verify(places.ROOT / folder, chats(20))


def test_weights_are_kept_in_bfloat16(written):
    assert {weight.dtype for weight in load_file(written / "model.safetensors").values()} == {torch.bfloat16}


def test_a_missing_weight_is_an_error(written):
    file = written / "model.safetensors"
    weights = load_file(file)
    weights.pop("model.norm.weight")
    save_file(weights, file)
    with pytest.raises(RuntimeError, match=r"norm\.weight"):
        layout.read(written)


def test_an_answer_is_right_when_forced_exactly_if_it_is_when_generated():
    network, tokenizer = layout.read(embedded.folder()), layout.read_tokenizer(embedded.folder())
    answer = with_transformers(embedded.folder(), "float32")
    asked = [world.chat(task, Random(0)) for task in ("facts", "sort", "classify", "extract", "count")]
    prompts, expected, forced_right = [], [], []
    for chat in asked:
        pieces = chat_pieces(chat)
        forced_right += forced.right_answers(network, forced.encoded(pieces, tokenizer))
        for i, message in enumerate(chat.messages):
            if message["role"] == "assistant":
                text = "".join(
                    piece.text for piece in chat_pieces(Chat([*chat.messages[:i], user("?")], chat.tools))[:-1]
                )
                prompts.append(tokenizer.encode(text + "<|im_start|>assistant\n").ids)
                expected.append(tokenizer.encode(answer_text(message) + END_OF_TURN).ids)
    generated_right = [ids == right for ids, right in zip(answer(prompts), expected, strict=True)]
    assert generated_right == forced_right
    assert any(forced_right)
