"""The registry of adapters: names, first uses that share one read, bounds, re-pointed names, refused paths."""

import asyncio
import re

import pytest
from adapter_folders import BROKEN, PretendedReader, digest_of, write_adapter

from quire.errors import ConfigError, RequestError
from quire.server import adapters as module
from quire.server.adapters import Adapters
from quire.server.api_keys import Caller
from quire.server.errors import AdapterPathNotAllowed, AdapterReadsBusy, UnknownAdapter
from quire.server.options import LoraModule, ServerOptions
from quire.server.thread_pool import ThreadPool

ANN, BOB = Caller("ann", "user"), Caller("bob", "user")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "adapters"
    for name in ("pirate", "json", "team/poet", "team/painter"):
        write_adapter(folder / name)
    write_adapter(folder / "bad", BROKEN)
    (folder / "empty").mkdir()
    return folder


class CountingPool(ThreadPool):
    """Counts its jobs: the looks at the disk."""

    num_looks = 0

    async def run(self, tenant, work):
        self.num_looks += 1
        return await super().run(tenant, work)


@pytest.fixture
def pool():
    pool = CountingPool()
    yield pool
    pool.close()


@pytest.fixture
def registered(folder, pool):
    """Runs a coroutine function of (registry, reader, clock). more: arguments of Adapters."""

    def run(work, **more):
        async def main():
            reader, clock = PretendedReader(), Clock()
            given = {"model_names": ("base",), "folder": folder, "is_enabled": True, "clock": clock}
            registry = Adapters(reader, pool, **{**given, **more})
            return await asyncio.wait_for(work(registry, reader, clock), 30)

        return asyncio.run(main())

    return run


async def settle():
    """Let all tasks go on until they wait for threads or events."""
    for _ in range(20):
        await asyncio.sleep(0.005)


def names(registry, caller=ANN):
    return [name for name, _ in registry.listed(caller)]


@pytest.mark.parametrize("name", ["pirate", "team/poet"])
def test_a_name_of_the_folder_is_read_at_its_first_use(registered, folder, name):
    async def work(registry, reader, clock):
        assert names(registry) == []
        first = await registry.resolve(name, ANN)
        assert await registry.resolve(name, BOB) is first
        assert reader.read == [(name, str(folder / name))]
        assert (first.digest, first.path) == (digest_of(name.split("/")[-1]), str(folder / name))
        assert names(registry) == [name]

    registered(work)


@pytest.mark.parametrize(
    "name",
    [
        *("other", "empty", "", ".", "..", "../adapters/pirate", "pirate/", "/pirate", "team/../pirate", "team//poet"),
        *(
            "a/b/c",
            "./pirate",
            "pirate/.",
            "~",
            "pirate\0",
            "\ud800",
            "x" * 300,
            "y" * 256,
            "link",
            "loop",
            "team\\poet",
        ),
    ],
)
def test_what_is_no_adapter_below_the_folder_is_unknown(registered, folder, tmp_path, name):
    (folder / "link").symlink_to(write_adapter(tmp_path / "outside"))
    (folder / "loop").symlink_to(folder / "loop")

    async def work(registry, reader, clock):
        assert await registry.resolve(name, ANN) is None
        assert reader.read == []

    registered(work)


def test_a_link_that_stays_below_the_folder_may_be_used(registered, folder):
    (folder / "newest").symlink_to(folder / "pirate")

    async def work(registry, reader, clock):
        assert (await registry.resolve("newest", ANN)).path == str(folder / "pirate")

    registered(work)


def test_without_adapters_or_a_folder_no_name_is_known(registered):
    async def work(registry, reader, clock):
        assert await registry.resolve("pirate", ANN) is None
        assert reader.read == []

    registered(work, is_enabled=False)
    registered(work, folder=None)


def test_a_limited_key_uses_and_sees_only_its_names(registered):
    async def work(registry, reader, clock):
        limited = Caller("ann", "user", adapters=frozenset({"json", "other"}))
        assert await registry.resolve("pirate", limited) is None
        assert reader.read == []  # not even a first use is seen
        await registry.resolve("pirate", ANN)
        assert await registry.resolve("pirate", limited) is None
        assert (await registry.resolve("json", limited)).name == "json"
        assert await registry.resolve("other", limited) is None
        assert (names(registry, limited), names(registry)) == (["json"], ["pirate", "json"])

    registered(work)


def test_first_uses_at_once_share_a_read_and_do_not_need_each_other(registered):
    async def work(registry, reader, clock):
        reader.open.clear()
        uses = [asyncio.ensure_future(registry.resolve("pirate", caller)) for caller in (ANN, BOB, ANN)]
        await settle()
        uses[0].cancel()  # the one that began the read
        await settle()
        reader.open.set()
        assert {one.digest for one in await asyncio.gather(*uses[1:])} == {digest_of("pirate")}
        assert len(reader.read) == 1

    registered(work)


def test_a_tenant_reads_few_adapters_at_once_and_others_still_may(registered, folder):
    for number in range(module.MAX_READS + 1):
        write_adapter(folder / f"a{number}")

    async def work(registry, reader, clock):
        reader.open.clear()
        uses = [asyncio.ensure_future(registry.resolve(f"a{i}", ANN)) for i in range(module.MAX_READS)]
        await settle()
        with pytest.raises(AdapterReadsBusy) as refused:
            await registry.resolve(f"a{module.MAX_READS}", ANN)
        assert (refused.value.status_code, refused.value.headers["retry-after"]) == (429, "1")
        shared = asyncio.ensure_future(registry.resolve("a0", ANN))  # no further read
        other = asyncio.ensure_future(registry.resolve("pirate", BOB))
        await settle()
        reader.open.set()
        assert all(await asyncio.gather(*uses, shared, other))
        assert await registry.resolve(f"a{module.MAX_READS}", ANN)

    registered(work)


@pytest.mark.parametrize("name", ["other", "bad"])
def test_a_failure_is_remembered_for_a_while(registered, folder, pool, name):
    async def attempt(registry):
        if name == "other":
            assert await registry.resolve(name, ANN) is None
            return
        with pytest.raises(RequestError, match="'bad' cannot be used; the server's log") as error:
            await registry.resolve(name, ANN)
        assert str(folder) not in str(error.value)

    async def work(registry, reader, clock):
        for _ in range(3):
            await attempt(registry)
        assert pool.num_looks == 1
        clock.now += module.FAILURE_SECONDS
        await attempt(registry)
        assert pool.num_looks == 2
        write_adapter(folder / name, "good")
        clock.now += module.FAILURE_SECONDS
        assert (await registry.resolve(name, ANN)).digest == digest_of("good")

    registered(work)


def test_what_is_remembered_of_failures_is_bounded(registered, pool, monkeypatch):
    monkeypatch.setattr(module, "MAX_FAILURES", 3)

    async def work(registry, reader, clock):
        for name in ("a", "b", "c", "c", "b", "a"):
            assert await registry.resolve(name, ANN) is None
        assert pool.num_looks == 3
        for name in ("d", "b", "c", "a"):  # d takes the place of a, and a that of b
            assert await registry.resolve(name, ANN) is None
        assert pool.num_looks == 5

    registered(work)


def test_loading_makes_a_name_that_failed_before_known_at_once(registered):
    async def work(registry, reader, clock):
        assert await registry.resolve("mine", ANN) is None
        await registry.load("mine", "pirate")
        assert (await registry.resolve("mine", ANN)).digest == digest_of("pirate")

    registered(work)


def test_a_name_is_loaded_and_repointed_and_unloaded(registered, folder):
    async def work(registry, reader, clock):
        await registry.load("mine", str(folder / "pirate"))
        before = await registry.resolve("mine", ANN)
        with pytest.raises(RequestError, match=r"'mine' has already been loaded.*load_inplace") as taken:
            await registry.load("mine", "json")
        assert taken.value.param == "lora_name"
        assert await registry.resolve("mine", ANN) is before
        ((_, entry),) = registry.listed(ANN)
        await registry.load("mine", "json", in_place=True)
        assert (await registry.resolve("mine", ANN)).digest == digest_of("json")
        assert before.digest == digest_of("pirate")  # what running requests carry
        ((_, later),) = registry.listed(ANN)
        assert later.number == entry.number
        assert await registry.unload(None, later.number) == "mine"
        assert await registry.resolve("mine", ANN) is None
        assert names(registry) == []

    registered(work)


def test_an_unknown_name_cannot_be_unloaded(registered):
    async def work(registry, reader, clock):
        await registry.load("mine", "pirate")
        for given in (("other", None), (None, 7), ("mine", 7)):
            with pytest.raises(UnknownAdapter, match="cannot be found"):
                await registry.unload(*given)
        with pytest.raises(RequestError, match="lora_name or lora_int_id"):
            await registry.unload(None)
        assert names(registry) == ["mine"]

    registered(work)


@pytest.mark.parametrize("path", ["..", "../outside", ".", "", "/", "/etc", "link", "team/../../outside", "{outside}"])
def test_a_path_outside_of_the_folder_is_refused(registered, folder, tmp_path, path):
    outside = write_adapter(tmp_path / "outside")
    (folder / "link").symlink_to(outside)

    async def work(registry, reader, clock):
        with pytest.raises(AdapterPathNotAllowed, match="--lora-dir"):
            await registry.load("mine", path.format(outside=outside))
        assert (reader.read, names(registry)) == ([], [])

    registered(work)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("mine", "none"), "no adapter at 'none'"),
        (("mine", "empty"), "adapter_config.json"),
        (("mine", "pirate\0"), "no adapter"),
        (("mine", "bad"), "cannot be used: .* holds no matrices"),
        (("base", "pirate"), "served model"),
        (("", "pirate"), "1 to 256"),
        (("a\nb", "pirate"), "1 to 256"),
        (("x" * 257, "pirate"), "1 to 256"),
    ],
)
def test_a_load_that_cannot_be_done_says_why_and_changes_nothing(registered, given, says):
    async def work(registry, reader, clock):
        with pytest.raises(RequestError, match=says):
            await registry.load(*given)
        assert names(registry) == []

    registered(work)


def test_without_a_folder_or_adapters_nothing_is_loaded_by_request(registered):
    async def load(registry, reader, clock):
        with pytest.raises(RequestError, match="--lora-dir"):
            await registry.load("mine", "pirate")

    registered(load, folder=None)

    async def none(registry, reader, clock):
        with pytest.raises(RequestError, match="--enable-lora"):
            await registry.load("mine", "pirate")
        with pytest.raises(RequestError, match="--enable-lora"):
            await registry.unload("mine")

    registered(none, is_enabled=False)


def test_loads_and_unloads_of_a_name_take_turns(registered):
    async def work(registry, reader, clock):
        reader.open.clear()
        changes = [
            asyncio.ensure_future(one)
            for one in (
                registry.load("mine", "pirate"),
                registry.load("mine", "json", in_place=True),
                registry.unload("mine"),
                registry.load("mine", "team/poet"),
            )
        ]
        other = asyncio.ensure_future(registry.load("yours", "json"))  # does not wait for them
        await settle()
        assert sorted(name for name, _ in reader.read) == ["mine", "yours"]
        reader.open.set()
        await asyncio.gather(*changes, other)
        assert (await registry.resolve("mine", ANN)).digest == digest_of("poet")

    registered(work)


def test_a_first_use_while_the_name_is_loaded_gets_what_is_loaded(registered):
    async def work(registry, reader, clock):
        reader.open.clear()
        load = asyncio.ensure_future(registry.load("pirate", "json"))
        await settle()
        use = asyncio.ensure_future(registry.resolve("pirate", ANN))
        await settle()
        reader.open.set()
        await load
        assert (await use).digest == digest_of("json")
        assert len(reader.read) == 1

    registered(work)


def test_an_adapter_stays_pinned_while_a_name_pins_it(registered):
    pirate, json = digest_of("pirate"), digest_of("json")

    async def work(registry, reader, clock):
        await registry.load("one", "pirate", pinned=True)
        await registry.load("two", "pirate", pinned=True)
        await registry.load("three", "pirate")
        assert reader.pins == [(pirate, True)] * 2
        await registry.unload("one")
        assert len(reader.pins) == 2
        await registry.load("two", "json", in_place=True, pinned=True)
        assert reader.pins[2:] == [(json, True), (pirate, False)]
        await registry.load("two", "json", in_place=True)
        assert reader.pins[4:] == [(json, False)]
        await registry.unload("three")
        assert len(reader.pins) == 5

    registered(work)


def test_an_adapter_that_cannot_be_pinned_is_not_loaded(registered):
    async def work(registry, reader, clock):
        async def refuse(adapter, *, pinned):
            raise RequestError("no room", "pinned")

        reader.pin_adapter = refuse
        with pytest.raises(RequestError, match="no room"):
            await registry.load("one", "pirate", pinned=True)
        assert names(registry) == []

    registered(work)


def test_the_number_of_names_is_bounded_and_those_of_the_folder_give_way(registered, monkeypatch):
    monkeypatch.setattr(module, "MAX_ADAPTERS", 3)

    async def work(registry, reader, clock):
        await registry.load("mine", "pirate")
        for name in ("json", "pirate", "json", "team/poet"):
            await registry.resolve(name, ANN)
        assert names(registry) == ["mine", "json", "team/poet"]  # pirate was used least recently
        for name in ("second", "third"):
            await registry.load(name, "pirate")
        assert names(registry) == ["mine", "second", "third"]
        for refused in (registry.load("fourth", "pirate"), registry.resolve("json", ANN)):
            with pytest.raises(RequestError):
                await refused
        await registry.load("third", "json", in_place=True)
        await registry.unload("second")
        await registry.load("fourth", "pirate")
        assert names(registry) == ["mine", "third", "fourth"]

    registered(work)


def test_modules_are_read_at_the_start(registered, folder):
    modules = [LoraModule("b", str(folder / "json")), LoraModule("a", str(folder / "pirate"))]

    async def work(registry, reader, clock):
        await registry.start()
        assert registry.failure is None
        assert names(registry) == ["b", "a"]
        assert (await registry.resolve("a", ANN)).digest == digest_of("pirate")

    registered(work, modules=modules)
    registered(work, modules=modules, folder=None)


@pytest.mark.parametrize(("name", "path", "says"), [("a", "bad", "a=.*holds no matrices"), ("base", "json", "served")])
def test_a_module_that_cannot_be_used_ends_the_start(registered, folder, name, path, says):
    async def work(registry, reader, clock):
        await registry.start()
        assert isinstance(registry.failure, ConfigError)
        assert re.search(f"lora_modules: .*{says}", str(registry.failure))

    registered(work, modules=[LoraModule("first", str(folder / "json")), LoraModule(name, str(folder / path))])


def test_options_name_adapters_as_text_or_as_json(folder, monkeypatch):
    monkeypatch.chdir(folder)
    texts = ("a=pirate", f'{{"name": "b", "path": "{folder}/json", "base_model_name": "x"}}', "c=team/poet")
    options = ServerOptions(lora_modules=texts)
    options.check()
    paths = [f"{folder}/pirate", f"{folder}/json", f"{folder}/team/poet"]
    assert options.adapters == list(map(LoraModule, "abc", paths))
    assert options.has_adapters
    assert ServerOptions(lora_dir=str(folder)).has_adapters
    assert not ServerOptions().has_adapters


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lora_modules": ("pirate",)}, "NAME=PATH"),
        ({"lora_modules": ("=pirate",)}, "NAME=PATH"),
        ({"lora_modules": ("a=",)}, "NAME=PATH"),
        ({"lora_modules": (" a=pirate",)}, "NAME=PATH"),
        ({"lora_modules": ("x" * 257 + "=pirate",)}, "NAME=PATH"),
        ({"lora_modules": ('{"name": "a"}',)}, "missing required field `path`"),
        ({"lora_modules": ('{"name": "a", "path": "pirate", "rank": 3}',)}, "rank"),
        ({"lora_modules": ("{",)}, "lora_modules"),
        ({"lora_modules": ("a=none",)}, "no adapter_config.json in .*none"),
        ({"lora_modules": ("a=pirate", "a=json")}, "'a' is given twice"),
        ({"lora_modules": ("a=pirate",), "served_model_name": ("b", "a")}, "served model"),
        ({"lora_dir": "none"}, "lora_dir: none is not a folder"),
        ({"lora_dir": "pirate/adapter_config.json"}, "not a folder"),
    ],
)
def test_wrong_options_are_refused_before_the_start(folder, monkeypatch, given, says):
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=says):
        ServerOptions(**given).check()
