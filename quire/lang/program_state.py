"""ProgramState: what a program's function gets as its first argument, and what a run returns. SGLang's methods."""

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

from quire.errors import RequestError
from quire.lang import expressions
from quire.lang.api import role
from quire.lang.stream import Append, Fork, Gather, Run, Stream


class GrowingText:
    """name: of the variable; None is all text. at_rest: nobody appends anything while the stream rests."""

    def __init__(self, stream: Stream, name: str | None, *, at_rest: bool) -> None:
        self._stream = stream
        self._name = name
        self._at_rest = at_rest
        self._length = 0  # characters that were read
        self._num_cuts = 0  # that were followed
        self._is_told = False  # a value that is no text

    def has_news(self) -> bool:
        """Whether there is more, or no more will be. Under the lock."""
        self._follow_cuts()
        length = self._stream.scene.length if self._name is None else len(self._text())
        return length > self._length or self.is_over()

    def is_over(self) -> bool:
        """Whether no more will come."""
        if self._name is None or self._name not in self._stream.names:
            return self._stream.is_over(at_rest=self._at_rest)
        return self._stream.is_settled(self._name)

    def news(self) -> tuple[Any, dict[str, Any]]:
        """What is new: text; of a variable that is a list, all of it once it is known."""
        with self._stream.changes:
            self._follow_cuts()
            meta = self._stream.scene.meta.get(self._name or "", {})
            value = self._stream.scene.variables.get(self._name or "", "")
            if self._name is not None and not isinstance(value, str):
                is_new = not self._is_told and self.is_over() and self._stream.error is None
                self._is_told |= is_new
                return value if is_new else "", meta
            text = self._text()[self._length :]
            self._length += len(text)
            return text, meta

    def check(self) -> None:
        """Raises what went wrong."""
        if self._name is not None:
            self._stream.value(self._name)
        elif self._stream.error is not None:
            raise self._stream.error

    def _text(self) -> str:
        scene = self._stream.scene
        if self._name is None:
            return scene.text
        value = scene.variables.get(self._name, "")
        return value if isinstance(value, str) else ""

    def _follow_cuts(self) -> None:
        """What was read and is there no more is not counted."""
        cuts = self._stream.scene.cuts
        for cut in cuts[self._num_cuts :]:
            if cut.name == self._name:
                self._length = cut.moved(self._length)
        self._num_cuts = len(cuts)


class ProgramState:
    """One line of a program.

    `s += expression` only appends: the backend's loop does it when its turn comes. Whoever reads waits: `s["x"]`
    for one variable, `s.text()` for all that was appended.

    An error ends a state. error() tells it; reading what it left unwritten raises it.
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
        """Append a turn of the system; without an expression, what is appended inside of `with`."""
        return self._turn("system", expr)

    @overload
    def user(self, expr: None = None) -> AbstractContextManager[None]: ...
    @overload
    def user(self, expr: object) -> expressions.Expr: ...
    def user(self, expr: object = None) -> expressions.Expr | AbstractContextManager[None]:
        """Append a turn of the user; without an expression, what is appended inside of `with`."""
        return self._turn("user", expr)

    @overload
    def assistant(self, expr: None = None) -> AbstractContextManager[None]: ...
    @overload
    def assistant(self, expr: object) -> expressions.Expr: ...
    def assistant(self, expr: object = None) -> expressions.Expr | AbstractContextManager[None]:
        """Append a turn of the assistant; without an expression, what is appended inside of `with`."""
        return self._turn("assistant", expr)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """All that is appended inside of `with` is also the variable `name`."""
        self._stream.submit(expressions.ScopeBegin(name))
        yield
        self._stream.submit(expressions.ScopeEnd(name))

    def fork(self, size: int = 1, position_ids_offset: object = None) -> "ProgramStateGroup":
        """States that go on from here by themselves. position_ids_offset: must be None. Raises RequestError."""
        if position_ids_offset is not None:
            raise RequestError("position_ids_offset is not supported; leave it out", "position_ids_offset")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise RequestError(f"fork makes at least 1 state, not {size!r}", "size")
        children = tuple(self._run.fork(self._stream.names) for _ in range(size))
        self._stream.submit(Fork(children))
        return ProgramStateGroup([ProgramState(self._run, child) for child in children], self)

    @contextmanager
    def copy(self) -> Iterator["ProgramState"]:
        """A state that goes on from here by itself, and is joined at the end of `with`."""
        group = self.fork(1)
        try:
            yield group[0]
        finally:
            group.join()

    # Reading

    def text(self) -> str:
        """All text, once all that was appended is done. Raises what went wrong."""
        self._settled()
        return self._stream.scene.text

    def messages(self) -> list[dict[str, str]]:
        """The turns that have ended, as OpenAI's messages. Raises what went wrong."""
        self._settled()
        return [dict(message) for message in self._stream.scene.messages]

    def sync(self) -> None:
        """Wait until all that was appended is done."""
        self._stream.sync()

    def error(self) -> BaseException | None:
        """What went wrong, once all that was appended is done or given up."""
        self._stream.sync()
        return self._stream.error

    def get_var(self, name: str) -> Any:  # noqa: ANN401
        """A variable, once it is known: text, or a list of texts. Raises what went wrong with it, or KeyError."""
        return self._stream.get_var(name)

    def set_var(self, name: str, value: object) -> None:
        """Set a variable; forks that begin later have it."""
        self._stream.submit(expressions.Assign(name, value))

    def get_meta_info(self, name: str, timeout: float | None = None) -> dict[str, Any] | None:
        """What the backend said of a variable. timeout: seconds, after which TimeoutError is raised."""
        return self._stream.get_meta(name, timeout)

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401
        return self.get_var(name)

    def __setitem__(self, name: str, value: object) -> None:
        self.set_var(name, value)

    def __contains__(self, name: object) -> bool:
        return name in self._stream.names

    def __repr__(self) -> str:
        return f"ProgramState({self._stream.scene.text!r})"

    # Reading while it grows

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Text as it comes: all of it, or of one variable. Of a run without stream=True, in one piece.

        Raises what went wrong, behind what came before it.
        """
        part = GrowingText(self._stream, var_name, at_rest=self._run.owner == threading.get_ident())
        if not self._run.setting.streaming:
            yield self.text() if var_name is None else self.get_var(var_name)
            return
        while True:
            self._stream.changes.wait(part.has_news)
            text, _ = part.news()
            if text:
                yield text
            elif part.is_over():
                part.check()
                return

    def var_iter(self, name: str) -> Iterator[str]:
        """The text of one variable as it comes."""
        return self.text_iter(name)

    @overload
    def text_async_iter(self, var_name: str | None = None) -> AsyncIterator[str]: ...
    @overload
    def text_async_iter(
        self, var_name: str | None = None, *, return_meta_data: bool
    ) -> AsyncIterator[str | tuple[str, dict[str, Any]]]: ...
    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:  # noqa: FBT001, FBT002 (SGLang's signature)
        """As text_iter, on any event loop. return_meta_data: pairs of a variable's text and its meta info so far."""
        part = GrowingText(self._stream, var_name, at_rest=False)
        while True:
            await self._stream.changes.until(part.has_news if self._run.setting.streaming else part.is_over)
            text, meta = part.news()
            if text:
                yield (text, meta) if return_meta_data and var_name is not None else text
            elif part.is_over():
                part.check()
                return

    def _settled(self) -> None:
        self._stream.sync()
        if self._stream.error is not None:
            raise self._stream.error

    def _turn(self, name: expressions.Role, expr: object) -> expressions.Expr | AbstractContextManager[None]:
        if expr is None:
            return self._turn_scope(name)
        self._stream.submit(role(name, expr))
        return expressions.Sequence(())  # so that `s += s.user(...)` means the same as `s.user(...)`

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
        """Let the state that was forked wait for its forks.

        "gather_variable": their new variables become lists, one entry for each fork that has it.
        "concate_and_append": what each has written since is appended. Raises RequestError for another mode.
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
            raise RequestError(f"join gathers ('gather_variable') or appends ('concate_and_append'), not {mode!r}")
        for stream in streams:
            stream.end()

    def __iadd__(self, other: object) -> "ProgramStateGroup":
        if isinstance(other, list | tuple) and len(other) != len(self.states):
            raise RequestError(f"there are {len(self.states)} forks, and the list says what {len(other)} get")
        for i, state in enumerate(self.states):
            state += _of_fork(other, i)
        return self

    def __getitem__(self, i: int) -> ProgramState:
        return self.states[i]

    def __setitem__(self, i: int, state: ProgramState) -> None:
        if state is not self.states[i]:  # what `forks[i] += ...` assigns
            raise RequestError("the states of a group stay as they are; append to them with +=")

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)


def _of_fork(other: object, i: int) -> object:
    """What fork i gets: one for all, one of a list, or what a function says."""
    if isinstance(other, list | tuple):
        return other[i]
    return other(i) if callable(other) else other
