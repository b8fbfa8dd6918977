"""Stands in for `tests.utils` of vLLM: its servers are those of quire.

Runs in the interpreter that has vLLM, next to vLLM's tests, and imports nothing of quire.
"""

import json
import os
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import anthropic
import openai

ROCM_EXTRA_ARGS: list[str] = []
VLLM_PATH = Path(__file__).parents[1]
_READY = re.compile(r"ready: .* on (http://127\.0\.0\.1:\d+) ")


class RemoteOpenAIServer:
    """A server with the interface of vLLM's class of this name.

    The variable QUIRE_SERVER of the environment has a JSON object: `command`, which takes a model and vLLM's options,
    the `environment` of the process, and `log`, a file to which its output is appended.
    """

    DUMMY_API_KEY = "key-of-a-server-without-keys"
    show_hidden_metrics = False

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: Mapping[str, str] | None = None,
        **_others: object,
    ) -> None:
        server = json.loads(os.environ["QUIRE_SERVER"])
        key = {name: value for name, value in (env_dict or {}).items() if name == "VLLM_API_KEY"}
        command = [*server["command"], model, *vllm_serve_args]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**server["environment"], **key}
        )
        self._log = Path(server["log"])
        found = next((match for line in self._output() if (match := _READY.match(line))), None)
        if found is None:
            raise RuntimeError(f"quire has not started: {' '.join(command)}")
        self.url_root = found[1]
        threading.Thread(target=list, args=[self._output()], daemon=True).start()  # a full pipe would stop the server

    def _output(self) -> Any:  # noqa: ANN401 (an iterator of lines)
        """The lines of the process, which also go to the log."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._log.open("a") as log:
                log.write(line)
            yield line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def url_for(self, *parts: str) -> str:
        """The URL of a path in parts."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:  # noqa: ANN401 (of the client)
        """OpenAI's client."""
        return openai.OpenAI(base_url=self.url_for("v1"), **self._client_options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:  # noqa: ANN401 (of the client)
        """The same, for asyncio."""
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._client_options(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:  # noqa: ANN401 (of the client)
        """Anthropic's client."""
        return anthropic.Anthropic(base_url=self.url_root, **self._client_options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:  # noqa: ANN401 (of the client)
        """The same, for asyncio."""
        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._client_options(options))

    def _client_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 60, **options}
