"""Small wheels with model files, and entries of quire's table of packaged models for them."""

import base64
import hashlib
import zipfile
from pathlib import Path

from quire.hub.packaged import PackagedModel


def write_wheel(folder, files, *, package="tiny-model", version="1.2", requires=("no-such-package-anywhere",)) -> Path:
    """Write a wheel with `files`, path -> content, that requires a package which no index has."""
    folder, stem = Path(folder), f"{package.replace('-', '_')}-{version}"
    folder.mkdir(exist_ok=True)
    metadata = [f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"]
    metadata += [f"Requires-Dist: {name}\n" for name in requires]
    content = {
        **files,
        f"{stem}.dist-info/METADATA": "".join(metadata).encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{stem}.dist-info/RECORD"
    lines = [f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in content.items()]
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
        archive.writestr(record, "".join([*lines, f"{record},,\n"]))
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def entry(wheel: Path, file: str, data: bytes, **changes) -> PackagedModel:
    """The table's entry of a model whose `file` in `wheel` has the content `data`."""
    package, version, *_ = wheel.name.split("-")
    facts = {
        "package": package.replace("_", "-"),
        "version": version,
        "wheel_bytes": wheel.stat().st_size,
        "file": file,
        "num_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "licence": "of the tests",
        "about": "a small file",
        "sampling": {},
    }
    return PackagedModel(**facts | changes)
