"""The state of a program: the first argument of its function, and the result of a run. Methods as in SGLang."""

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

from quire.errors import RequestError
from quire.lang import expressions
from quire.lang.api import role
from quire.lang.stream import Append, Fork, Gather, Run, Stream


class TextStream:
    """Reads the text of a stream, or of one variable, while it grows.

    name: of the variable; None means all text. idle_is_final: whether an idle stream counts as finished,
    because the thread that reads is the one that would append.
    """

    def __init__(self, stream: Stream, name: str | None, *, idle_is_final: bool) -> None:
        self._stream = stream
        self._name = name
        self._idle_is_final = idle_is_final
        self._length = 0  # characters that were returned
        self._num_cuts = 0  # cuts that are subtracted from _length
        self._value_returned = False  # whether the value was returned, of a variable that is no text

    def has_new_text(self) -> bool:
        """Whether there is new text, or the end is reached. To be called under the lock."""
        self._apply_cuts()
        length = self._stream.state_text.length if self._name is None else len(self._text())
        return length > self._length or self.is_final()

    def is_final(self) -> bool:
        """Whether the text is final."""
        if self._name is None or self._name not in self._stream.names:
            return self._stream.is_final(idle_is_final=self._idle_is_final)
        return self._stream.is_settled(self._name)

    def read_new(self) -> tuple[Any, dict[str, Any]]:
        """The new text and the meta info so far. A value that is no text is returned once, when it is final."""
        with self._stream.condition:
            self._apply_cuts()
            meta = self._stream.state_text.meta.get(self._name or "", {})
            value = self._stream.state_text.variables.get(self._name or "", "")
            if self._name is not None and not isinstance(value, str):
                is_new = not self._value_returned and self.is_final() and self._stream.error is None
                self._value_returned |= is_new
                return value if is_new else "", meta
            text = self._text()[self._length :]
            self._length += len(text)
            return text, meta

    def check(self) -> None:
        """Raises the error of the stream or the variable, if there is one."""
        if self._name is not None:
            self._stream.value(self._name)
        elif self._stream.error is not None:
            raise self._stream.error

    def _text(self) -> str:
        state_text = self._stream.state_text
        if self._name is None:
            return state_text.text
        value = state_text.variables.get(self._name, "")
        return value if isinstance(value, str) else ""

    def _apply_cuts(self) -> None:
        """Subtract characters that were returned and then cut."""
        cuts = self._stream.state_text.cuts
        for cut in cuts[self._num_cuts :]:
            if cut.name == self._name:
                self._length = cut.moved(self._length)
        self._num_cuts = len(cuts)


class ProgramState:
    """The state of a program, or of one fork of it.

    `s += expression` only appends an operation, which the backend's event loop executes later. Reading waits: `s["x"]`
    for one variable, `s.text()` for all appended operations.

    An error ends a state. error() returns it; reading text or variables that are missing because of it raises it.
    """

    def __init__(self, run: Run, stream: Stream) -> None:
        self._run = run
        self._stream = stream
        self.ret_value: object = None  # what the program's function returned

    # Appending

    def __iadd__(self, other: object) -> "ProgramState":
        self._stream.submit(expressions.expression(other))
        return self

    @overload
    def system(self, expr: None = None) -> AbstractContextManager[None]: ...
    @overload
    def system(self, expr: object) -> expressions.Expr: ...
    def system(self, expr: object = None) -> expressions.Expr | AbstractContextManager[None]:
        """Append a turn of the system. Without `expr`: a context manager; the turn is what is appended in `with`."""
        return self._turn("system", expr)

    @overload
    def user(self, expr: None = None) -> AbstractContextManager[None]: ...
    @overload
    def user(self, expr: object) -> expressions.Expr: ...
    def user(self, expr: object = None) -> expressions.Expr | AbstractContextManager[None]:
        """Append a turn of the user. Without `expr`: a context manager; the turn is what is appended in `with`."""
        return self._turn("user", expr)

    @overload
    def assistant(self, expr: None = None) -> AbstractContextManager[None]: ...
    @overload
    def assistant(self, expr: object) -> expressions.Expr: ...
    def assistant(self, expr: object = None) -> expressions.Expr | AbstractContextManager[None]:
        """Append a turn of the assistant. Without `expr`: a context manager; the turn is what is appended in `with`."""
        return self._turn("assistant", expr)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """The text that is appended in `with` becomes the variable `name`."""
        self._stream.submit(expressions.ScopeBegin(name))
        yield
        self._stream.submit(expressions.ScopeEnd(name))

    def fork(self, size: int = 1, position_ids_offset: object = None) -> "ProgramStateGroup":
        """`size` independent states that start with the text so far. position_ids_offset: must be None."""
        if position_ids_offset is not None:
            raise RequestError("position_ids_offset is not supported; leave it out", "position_ids_offset")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise RequestError(f"fork makes at least 1 state, not {size!r}", "size")
        children = tuple(self._run.fork(self._stream.names) for _ in range(size))
        self._stream.submit(Fork(children))
        return ProgramStateGroup([ProgramState(self._run, child) for child in children], self)

    @contextmanager
    def copy(self) -> Iterator["ProgramState"]:
        """An independent state that starts with the text so far, and is joined at the end of `with`."""
        group = self.fork(1)
        try:
            yield group[0]
        finally:
            group.join()

    # Reading

    def text(self) -> str:
        """Wait for all appended operations, and return the whole text. Raises the state's error."""
        self._sync_and_check()
        return self._stream.state_text.text

    def messages(self) -> list[dict[str, str]]:
        """Wait for all appended operations, and return the ended turns as OpenAI messages. Raises the state's error."""
        self._sync_and_check()
        return [dict(message) for message in self._stream.state_text.messages]

    def sync(self) -> None:
        """Wait for all appended operations, or for an error."""
        self._stream.sync()

    def error(self) -> BaseException | None:
        """Wait for all appended operations, and return the state's error; None if there is none."""
        self._stream.sync()
        return self._stream.error

    def get_var(self, name: str) -> Any:  # noqa: ANN401
        """Wait for a variable and return it: text, or a list of texts. Raises its error, or KeyError."""
        return self._stream.get_var(name)

    def set_var(self, name: str, value: object) -> None:
        """Append an operation that sets a variable. Later forks have it."""
        self._stream.submit(expressions.Assign(name, value))

    def get_meta_info(self, name: str, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait for a variable and return its meta info. Raises its error, and TimeoutError after `timeout` seconds."""
        return self._stream.get_meta(name, timeout)

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401
        return self.get_var(name)

    def __setitem__(self, name: str, value: object) -> None:
        self.set_var(name, value)

    def __contains__(self, name: object) -> bool:
        return name in self._stream.names

    def __repr__(self) -> str:
        return f"ProgramState({self._stream.state_text.text!r})"

    # Streaming

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Yield the text, or the text of one variable, as it is generated. Without stream=True it is one piece.

        Raises the state's error after the text before it.
        """
        part = TextStream(self._stream, var_name, idle_is_final=self._run.owner == threading.get_ident())
        if not self._run.setting.streaming:
            yield self.text() if var_name is None else self.get_var(var_name)
            return
        while True:
            self._stream.condition.wait(part.has_new_text)
            text, _ = part.read_new()
            if text:
                yield text
            elif part.is_final():
                part.check()
                return

    def var_iter(self, name: str) -> Iterator[str]:
        """Yield the text of one variable as it is generated."""
        return self.text_iter(name)

    @overload
    def text_async_iter(self, var_name: str | None = None) -> AsyncIterator[str]: ...
    @overload
    def text_async_iter(
        self, var_name: str | None = None, *, return_meta_data: bool
    ) -> AsyncIterator[str | tuple[str, dict[str, Any]]]: ...
    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:  # noqa: FBT001, FBT002 (SGLang's signature)
        """As text_iter, for any event loop. return_meta_data: yield a variable's text in pairs with its meta info."""
        part = TextStream(self._stream, var_name, idle_is_final=False)
        while True:
            await self._stream.condition.wait_async(part.has_new_text if self._run.setting.streaming else part.is_final)
            text, meta = part.read_new()
            if text:
                yield (text, meta) if return_meta_data and var_name is not None else text
            elif part.is_final():
                part.check()
                return

    def _sync_and_check(self) -> None:
        self._stream.sync()
        if self._stream.error is not None:
            raise self._stream.error

    def _turn(self, name: expressions.Role, expr: object) -> expressions.Expr | AbstractContextManager[None]:
        if expr is None:
            return self._turn_scope(name)
        self._stream.submit(role(name, expr))
        return expressions.Sequence(())  # so that `s += s.user(...)` does the same as `s.user(...)`

    @contextmanager
    def _turn_scope(self, name: expressions.Role) -> Iterator[None]:
        self._stream.submit(expressions.RoleBegin(name))
        yield
        self._stream.submit(expressions.RoleEnd(name))


class ProgramStateGroup:
    """Forks of one state."""

    def __init__(self, states: Sequence[ProgramState], src_state: ProgramState) -> None:
        self.states = list(states)
        self.src_state = src_state

    def join(self, mode: str = "gather_variable") -> None:
        """Append an operation to the parent state that waits for the operations appended to the forks so far.

        "gather_variable": the forks' new variables become lists, with one entry for each fork that has the variable.
        "concate_and_append": the text of each fork since the fork is appended. Raises RequestError for another mode.
        """
        streams = [state._stream for state in self.states]
        parent = self.src_state._stream
        branches = tuple((stream, stream.num_submitted) for stream in streams)
        if mode == "gather_variable":
            new = dict.fromkeys(name for stream in streams for name in sorted(stream.names - parent.names))
            parent.submit(Gather(branches, tuple(new)))
        elif mode == "concate_and_append":
            parent.submit(Append(branches))
        else:
            raise RequestError(f"the mode of join must be 'gather_variable' or 'concate_and_append', not {mode!r}")
        for stream in streams:
            stream.end()

    def __iadd__(self, other: object) -> "ProgramStateGroup":
        if isinstance(other, list | tuple) and len(other) != len(self.states):
            raise RequestError(f"the list has {len(other)} entries for {len(self.states)} forks")
        for i, state in enumerate(self.states):
            state += _expr_for_fork(other, i)
        return self

    def __getitem__(self, i: int) -> ProgramState:
        return self.states[i]

    def __setitem__(self, i: int, state: ProgramState) -> None:
        if state is not self.states[i]:  # `forks[i] += ...` assigns the same state
            raise RequestError("the states of a group cannot be replaced; append to them with +=")

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)


def _expr_for_fork(other: object, i: int) -> object:
    """The expression for fork i: entry i of a list, the result of a function of i, or the same for all."""
    if isinstance(other, list | tuple):
        return other[i]
    return other(i) if callable(other) else other
