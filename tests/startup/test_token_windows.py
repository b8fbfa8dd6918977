"""Token ids of a text file, and their windows."""

from small_tokenizers import llama3, write_folder

from quire.startup.token_windows import read_token_ids, token_windows
from quire.tokenizer.tokenizer import Tokenizer


def test_each_window_begins_with_the_begin_token(tmp_path):
    folder = write_folder(tmp_path, llama3(), tokenizer_config={"bos_token": "<|im_start|>"})
    tokenizer = Tokenizer.from_folder(folder)
    (tmp_path / "text").write_text("The kettle stands on the shelf. " * 400)
    ids = read_token_ids(tmp_path / "text", tokenizer, 10_000)
    assert ids == tokenizer.encode((tmp_path / "text").read_text()) and ids[0] == tokenizer.bos_token_id
    windows = token_windows(ids, 100, tokenizer.bos_token_id)
    assert all(one[0] == ids[0] for one in windows)
    assert [token for one in windows for token in one[1:]] == ids[1:]
    assert {len(one) for one in windows[:-1]} == {100} and len(windows[-1]) <= 100


def test_a_begin_token_is_not_added():
    assert token_windows([5, 6, 7, 8, 9], 2, 1) == [[5, 6], [7, 8], [9]]
    assert token_windows([], 2, 1) == []


def test_a_long_text_is_cut(tmp_path, tokenizer):
    (tmp_path / "long").write_text("Two and two are four. " * 1000)
    assert len(read_token_ids(tmp_path / "long", tokenizer, 2000)) == 2000
