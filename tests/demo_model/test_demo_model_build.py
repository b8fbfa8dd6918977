"""The build command, on a millionth of the tokens: it creates all files."""

import json
import shutil

from embedded_model_files import shipped_files

from quire.hub import embedded
from tools.demo_model import layout, make, places


def test_the_build_makes_all_shipped_files_from_an_empty_folder(tmp_path, capsys):
    (tmp_path / places.PAGE).parent.mkdir(parents=True)
    shutil.copy(places.ROOT / places.PAGE, tmp_path / places.PAGE)
    make.main(["--root", str(tmp_path), "--scale", "1e-6", "--eager", "--tasks", "copy", "--chats", "1"])
    assert "making golden table" in capsys.readouterr().out
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    for folder in (places.BASE, places.DRAFT):
        assert {f"{folder}/{file.name}" for file in shipped_files()} <= files
    for style in ("pirate", "json"):
        assert f"{places.adapter(style)}/adapter_model.safetensors" in files
    assert not any(name.startswith("build/") and name.endswith(".safetensors") for name in files)
    counted = json.loads((tmp_path / places.GOLDEN).read_text())
    assert counted.keys() == {"chats", "seed", "base", "draft", "pirate", "json"}


def test_the_shipped_files_that_no_training_decides_are_the_ones_it_makes(tmp_path):
    layout.write(tmp_path, layout.read(embedded.folder()), make.train_tokenizer(0))
    for file in shipped_files():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name
