"""Programs, and the methods to run them, named as in SGLang."""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack, overload

from quire.errors import ConfigError, RequestError, nearest
from quire.lang.backends.backend import Backend
from quire.lang.batch import run_all
from quire.lang.errors import BackendClosed, Cancelled
from quire.lang.interpreter import Setting
from quire.lang.params import GenParams, Sampling, normalize_params
from quire.lang.program_state import ProgramState
from quire.lang.stream import Run


@dataclass(slots=True)
class GlobalConfig:
    """SGLang's `global_config`. default_backend: of runs that have no `backend` argument. The others have no effect."""

    default_backend: Backend | None = None
    verbosity: int = 0
    enable_precache_with_tracing: bool = True
    enable_parallel_encoding: bool = True


global_config = GlobalConfig()


def set_default_backend(backend: Backend | None) -> None:
    """Set the backend of runs that have no `backend` argument."""
    global_config.default_backend = backend


def backend_or_default(backend: Backend | None) -> Backend:
    """The given backend, or else the default. Raises ConfigError if there is none."""
    found = backend or global_config.default_backend
    if found is None:
        raise ConfigError("there is no backend: give backend=..., or call set_default_backend(...) first")
    return found


def flush_cache(backend: Backend | None = None) -> None:
    """Evict cached KV that no running request uses. Raises ConfigError, RequestError."""
    backend_or_default(backend).flush_cache()


ProgramFunction = Callable[..., object]


class Function:
    """A program: a function whose first argument is its state.

    num_api_spec_tokens: the least max_tokens of a call, which then continues past the stops of a gen; of a chat
    endpoint, max_tokens of an assistant's turn. None turns API speculation off. bound: arguments set by `bind`.
    """

    def __init__(
        self,
        program: ProgramFunction,
        num_api_spec_tokens: int | None = None,
        bound: Mapping[str, object] | None = None,
    ) -> None:
        self._signature = inspect.signature(program)
        parameters = list(self._signature.parameters.values())
        if not parameters or parameters[0].kind not in _POSITIONAL:
            raise RequestError(f"{program.__name__} needs a first argument for its state")
        if inspect.iscoroutinefunction(program):
            raise RequestError(f"{program.__name__} must not be async; run it with arun()")
        if num_api_spec_tokens is not None and num_api_spec_tokens < 1:
            raise RequestError("num_api_spec_tokens must be at least 1", "num_api_spec_tokens")
        self.func = program
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bind_arguments = dict(bound or {})
        self.arg_names = [one.name for one in parameters[1:]]
        self._has_var_keyword = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self.__name__ = program.__name__
        self.__doc__ = program.__doc__

    def bind(self, **arguments: object) -> "Function":
        """The same program with some arguments set. Raises RequestError for an unknown argument."""
        for name in arguments:
            if name not in self.arg_names and not self._has_var_keyword:
                raise RequestError(f"{self.__name__} has no argument {name!r}{nearest(name, self.arg_names)}", name)
        return Function(self.func, self.num_api_spec_tokens, {**self.bind_arguments, **arguments})

    def run(
        self,
        *args: object,
        stream: bool = False,
        backend: Backend | None = None,
        **options: Any,  # noqa: ANN401
    ) -> ProgramState:
        """Run the program to its end.

        options: the program's arguments, and defaults of its gens (fields of Sampling, and max_new_tokens).
        stream: return at once; the function runs on a thread, and text_iter() yields the text.
        Raises the errors of the function, RequestError and ConfigError. The error of a model call is not raised here:
        state.error() returns it, and reading text or variables that are missing because of it raises it.
        """
        setting, arguments = self._split(options, backend, streaming=stream)
        run = Run(setting)
        state = ProgramState(run, run.trunk)
        if not stream:
            return self._run(run, state, args, arguments)
        context = contextvars.copy_context()
        aside = (self._run_in_thread, run, state, args, arguments)
        threading.Thread(target=context.run, args=aside, name="quire-program", daemon=True).start()
        return state

    __call__ = run

    async def arun(self, *args: object, backend: Backend | None = None, **options: Any) -> ProgramState:  # noqa: ANN401
        """As run, for a coroutine: the function runs on a thread. If the caller is cancelled, so is the program.

        At most 96 programs run at a time on a backend.
        """
        setting, arguments = self._split(options, backend, streaming=bool(options.pop("stream", False)))
        run = Run(setting)
        try:
            return await asyncio.wrap_future(self._submit(run, args, arguments))
        except asyncio.CancelledError:
            run.stop(Cancelled("the program was cancelled"))
            raise

    @overload
    def run_batch(self, batch_kwargs: Sequence[Any], **options: Unpack["BatchOptions"]) -> list[ProgramState]: ...
    @overload
    def run_batch(
        self, batch_kwargs: Sequence[Any], *, generator_style: bool, **options: Unpack["BatchOptions"]
    ) -> list[ProgramState] | Iterator[ProgramState]: ...
    def run_batch(
        self,
        batch_kwargs: Sequence[Any],
        *,
        generator_style: bool = False,
        **options: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run the program once per entry: a mapping of its arguments, or a list of them in order.

        options: fields of BatchOptions. generator_style: return an iterator, which yields each state as soon as it and
        those before it are done, instead of a list.
        Raises RequestError if an entry does not fit the function, and the first error that the function raises. The
        error of a model call is only returned by its state's error(), and the other runs continue.
        """
        num_threads, bar = options.pop("num_threads", "auto"), bool(options.pop("progress_bar", False))
        setting, _ = self._split(options, options.pop("backend", None), streaming=False)
        each = [self._arguments(entry) for entry in batch_kwargs]
        runs: list[Run] = []

        def give_up() -> None:
            for run in list(runs):
                run.stop(Cancelled("the batch was cancelled"))

        work = [partial(self._run_batch_entry, setting, runs, one) for one in each]
        states = run_all(work, num_threads, give_up, show_progress=bar, name=self.__name__)
        return states if generator_style else list(states)

    def _run(
        self, run: Run, state: ProgramState, args: tuple[object, ...], arguments: Mapping[str, object]
    ) -> ProgramState:
        run.begin()
        try:
            state.ret_value = self.func(state, *args, **arguments)
            run.end()
            run.sync()
        except BaseException as error:
            run.stop(error)
            run.end()
            raise
        return state

    def _submit(self, run: Run, args: tuple[object, ...], arguments: Mapping[str, object]) -> Future[ProgramState]:
        """Submit a run to the backend's thread pool. Raises BackendClosed."""
        state = ProgramState(run, run.trunk)
        try:
            return run.setting.backend.program_pool.submit(
                contextvars.copy_context().run, self._run, run, state, args, arguments
            )
        except RuntimeError as error:
            raise BackendClosed("this backend is closed; make another one") from error

    def _run_in_thread(
        self, run: Run, state: ProgramState, args: tuple[object, ...], arguments: Mapping[str, object]
    ) -> None:
        """Run the function, and ignore its errors, which are the state's error."""
        with suppress(Exception):
            self._run(run, state, args, arguments)

    def _run_batch_entry(self, setting: Setting, runs: list[Run], arguments: Mapping[str, object]) -> ProgramState:
        """Run one entry of a batch. An error that came from a model call is not raised, also if the function raised it.

        runs: the unfinished runs of the batch; this run is in the list while it is unfinished.
        """
        run = Run(setting)
        runs.append(run)
        state = ProgramState(run, run.trunk)
        try:
            return self._run(run, state, (), arguments)
        except Exception:
            if not run.failed_by_stream:
                raise
            return state
        finally:
            runs.remove(run)

    def _split(
        self, options: dict[str, Any], backend: Backend | None, *, streaming: bool
    ) -> tuple[Setting, dict[str, Any]]:
        """The options as Setting (defaults of gens) and arguments. A name that is both is an argument."""
        arguments = dict(self.bind_arguments)
        gen_options = {}
        for name, value in options.items():
            if name in self.arg_names or (name not in _DEFAULTS and self._has_var_keyword):
                arguments[name] = value
            elif name in _DEFAULTS:
                gen_options[name] = value
            else:
                known = [*self.arg_names, *_DEFAULTS]
                raise RequestError(f"{self.__name__} has no argument {name!r}{nearest(name, known)}", name)
        setting = Setting(
            backend=backend_or_default(backend),
            defaults=GenParams().with_overrides(normalize_params(gen_options)),
            streaming=streaming,
            num_api_spec_tokens=self.num_api_spec_tokens,
        )
        return setting, arguments

    def _arguments(self, entry: object) -> dict[str, object]:
        """The arguments of one entry of a batch. Raises RequestError if they do not fit the function."""
        try:
            if isinstance(entry, list | tuple) and len(entry) <= len(self.arg_names):
                entry = dict(zip(self.arg_names, entry, strict=False))
            if not isinstance(entry, Mapping):
                raise TypeError("neither fits")
            arguments = {**self.bind_arguments, **entry}
            self._signature.bind(None, **arguments)
        except TypeError as error:
            names = ", ".join(self.arg_names) or "nothing"
            raise RequestError(
                f"an entry of a batch must be a mapping or a list of {names}, not {entry!r:.80} ({error})",
                "batch_kwargs",
            ) from error
        return arguments


class BatchOptions(Sampling, total=False):
    """num_threads: most programs that run at a time; "auto" is 96. progress_bar: show one on stderr."""

    max_new_tokens: int
    backend: Backend | None
    num_threads: int | str
    progress_bar: bool


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_DEFAULTS = frozenset((*Sampling.__annotations__, "max_new_tokens"))


@overload
def function(func: ProgramFunction) -> Function: ...
@overload
def function(*, num_api_spec_tokens: int | None = None) -> Callable[[ProgramFunction], Function]: ...
def function(
    func: ProgramFunction | None = None, num_api_spec_tokens: int | None = None
) -> Function | Callable[[ProgramFunction], Function]:
    """Decorator that makes a function a program. num_api_spec_tokens: see Function. Raises RequestError."""
    if func is not None:
        return Function(func, num_api_spec_tokens)
    return lambda program: Function(program, num_api_spec_tokens)
