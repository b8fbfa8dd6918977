"""Function: a program, and the ways to run it. SGLang's methods."""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Unpack, overload

from quire.errors import ConfigError, RequestError, nearest
from quire.lang.backends.backend import Backend
from quire.lang.batch import run_all
from quire.lang.errors import BackendClosed, Cancelled
from quire.lang.interpreter import Setting
from quire.lang.params import GenParams, Sampling, said_of
from quire.lang.program_state import ProgramState
from quire.lang.stream import Run


class _Default:
    backend: Backend | None = None


def set_default_backend(backend: Backend | None) -> None:
    """What programs run on that name no backend."""
    _Default.backend = backend


def backend_or_default(backend: Backend | None) -> Backend:
    """The one that was given, or else the default. Raises ConfigError where there is none."""
    found = backend or _Default.backend
    if found is None:
        raise ConfigError("there is no backend: give backend=..., or call set_default_backend(...) first")
    return found


def flush_cache(backend: Backend | None = None) -> None:
    """Let a backend forget all KV that nobody uses. Raises ConfigError, RequestError."""
    backend_or_default(backend).flush_cache()


ProgramFunction = Callable[..., object]


class Function:
    """A program: a function whose first argument is its state.

    num_api_spec_tokens: of backends without constraints: what one call asks for at least, past the stops of a gen.
    bound: arguments that are given already.
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
            raise RequestError(f"{program.__name__} needs a first argument, which is its state")
        if inspect.iscoroutinefunction(program):
            raise RequestError(f"{program.__name__} must not be async; run it with arun()")
        if num_api_spec_tokens is not None and num_api_spec_tokens < 1:
            raise RequestError("num_api_spec_tokens must be at least 1", "num_api_spec_tokens")
        self.func = program
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bind_arguments = dict(bound or {})
        self.arg_names = [one.name for one in parameters[1:]]
        self._takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self.__name__ = program.__name__
        self.__doc__ = program.__doc__

    def bind(self, **arguments: object) -> "Function":
        """The same program with some arguments given. Raises RequestError for one that it does not have."""
        for name in arguments:
            if name not in self.arg_names and not self._takes_any:
                raise RequestError(f"{self.__name__} has no argument {name!r}{nearest(name, self.arg_names)}", name)
        return Function(self.func, self.num_api_spec_tokens, {**self.bind_arguments, **arguments})

    def run(
        self,
        *args: object,
        stream: bool = False,
        backend: Backend | None = None,
        **options: Any,  # noqa: ANN401
    ) -> ProgramState:
        """Run it to its end. options: the program's arguments, and defaults of its gens (fields of Sampling, and
        max_new_tokens).

        stream: return at once; the function runs on a thread, and text_iter() tells what comes.
        Raises what the function raises, RequestError and ConfigError. What goes wrong with a call is not raised
        here: state.error() tells it, and reading what it left unwritten raises it.
        """
        setting, arguments = self._split(options, backend, streaming=stream)
        run = Run(setting)
        state = ProgramState(run, run.trunk)
        if not stream:
            return self._run(run, state, args, arguments)
        context = contextvars.copy_context()
        aside = (self._run_aside, run, state, args, arguments)
        threading.Thread(target=context.run, args=aside, name="quire-program", daemon=True).start()
        return state

    __call__ = run

    async def arun(self, *args: object, backend: Backend | None = None, **options: Any) -> ProgramState:  # noqa: ANN401
        """As run, for a coroutine: the function runs on a thread, and is given up where the caller is cancelled.

        Up to 96 run at a time on a backend.
        """
        setting, arguments = self._split(options, backend, streaming=bool(options.pop("stream", False)))
        run = Run(setting)
        try:
            return await asyncio.wrap_future(self._begun(run, args, arguments))
        except asyncio.CancelledError:
            run.stop(Cancelled("the program was given up"))
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
        """Run it once for each entry: a mapping of its arguments, or a list of them in order.

        options: fields of BatchOptions. generator_style: an iterator that has each state as soon as it and those
        before it are done, in place of a list.
        Raises RequestError where entries do not fit the function, and the first thing that one of the functions
        raises; a failed call is told by its state's error() alone, and the others go on.
        """
        num_threads, bar = options.pop("num_threads", "auto"), bool(options.pop("progress_bar", False))
        setting, _ = self._split(options, options.pop("backend", None), streaming=False)
        each = [self._arguments(entry) for entry in batch_kwargs]
        runs: list[Run] = []

        def give_up() -> None:
            for run in list(runs):
                run.stop(Cancelled("the batch was given up"))

        work = [partial(self._run_of_batch, setting, runs, one) for one in each]
        states = run_all(work, num_threads, give_up, shown=bar, name=self.__name__)
        return states if generator_style else list(states)

    def _run(
        self, run: Run, state: ProgramState, args: tuple[object, ...], arguments: Mapping[str, object]
    ) -> ProgramState:
        run.owner = threading.get_ident()
        try:
            state.ret_value = self.func(state, *args, **arguments)
            run.end()
            run.sync()
        except BaseException as error:
            run.stop(error)
            run.end()
            raise
        return state

    def _begun(self, run: Run, args: tuple[object, ...], arguments: Mapping[str, object]) -> Future[ProgramState]:
        """On one of the backend's threads, as soon as there is one. Raises BackendClosed."""
        state = ProgramState(run, run.trunk)
        try:
            return run.setting.backend.programs.submit(
                contextvars.copy_context().run, self._run, run, state, args, arguments
            )
        except RuntimeError as error:
            raise BackendClosed("this backend is closed; make another one") from error

    def _run_aside(
        self, run: Run, state: ProgramState, args: tuple[object, ...], arguments: Mapping[str, object]
    ) -> None:
        """What goes wrong is the state's error."""
        with suppress(Exception):
            self._run(run, state, args, arguments)

    def _run_of_batch(self, setting: Setting, runs: list[Run], arguments: Mapping[str, object]) -> ProgramState:
        """A call that failed is the state's matter, also where the function stumbled over it.

        runs: those that go on.
        """
        run = Run(setting)
        runs.append(run)
        state = ProgramState(run, run.trunk)
        try:
            return self._run(run, state, (), arguments)
        except Exception:
            if not run.failed_by_itself:
                raise
            return state
        finally:
            runs.remove(run)

    def _split(
        self, options: dict[str, Any], backend: Backend | None, *, streaming: bool
    ) -> tuple[Setting, dict[str, Any]]:
        """Defaults of gens and arguments of the function, which have the precedence."""
        arguments = dict(self.bind_arguments)
        said = {}
        for name, value in options.items():
            if name in self.arg_names or (name not in _DEFAULTS and self._takes_any):
                arguments[name] = value
            elif name in _DEFAULTS:
                said[name] = value
            else:
                known = [*self.arg_names, *_DEFAULTS]
                raise RequestError(f"{self.__name__} has no argument {name!r}{nearest(name, known)}", name)
        setting = Setting(
            backend=backend_or_default(backend),
            defaults=GenParams().changed(said_of(said)),
            streaming=streaming,
            num_api_spec_tokens=self.num_api_spec_tokens,
        )
        return setting, arguments

    def _arguments(self, entry: object) -> dict[str, object]:
        """Of one entry of a batch. Raises RequestError where they are not the function's."""
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
    """num_threads: programs that run at a time; "auto" is up to 96. progress_bar: on the error stream."""

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
    """Make a program of a function. num_api_spec_tokens: see Function. Raises RequestError."""
    if func is not None:
        return Function(func, num_api_spec_tokens)
    return lambda program: Function(program, num_api_spec_tokens)
