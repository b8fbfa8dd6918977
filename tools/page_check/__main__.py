"""The page in headless Chromium, against real servers with the embedded model.

    python -m tools.page_check [--short] [--pictures FOLDER] [--json FILE]

It talks, stops, makes branches, watches blocks under load, explains a request, plays a journal, tries keys, and checks
that the browser asks nothing but the server, that the content security policy is never violated, that axe has no
serious finding, that the first paint is early and the files are small. The exit code is 1 if a check fails, and 2
without a browser. --short leaves out the journal and most pictures.
"""

import argparse
import gzip
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

import quire
from benchmarks.commit import ROOT
from benchmarks.result_file import write_result
from tools.page_check import handling, kept, see, servers, styles, talk
from tools.page_check.accessibility import findings, grave
from tools.page_check.browser import NoBrowser, browser, watched

ASSETS = ROOT / "quire" / "assets" / "page"
UNITS = ROOT / "tests" / "page" / "units.js"
MANY_BLOCKS = ROOT / "tests" / "page" / "many_blocks.js"
MOST_MS = 100  # for one update of 100,000 blocks: ten come a second at most
MOST_BYTES = 400 * 1024  # compressed, page and libraries
MOST_SECONDS = 1.0  # until the first paint
SIZES = {"wide": (1440, 900), "tablet": (768, 1024), "phone": (390, 844)}
SCHEMES = ("dark", "light")
TALK = (
    talk.check_chat,
    talk.check_stop,
    talk.check_branches,
    talk.check_tokens,
    talk.check_each_token_once,
    talk.check_drafts,
    talk.check_two_tabs,
    talk.check_tools,
    talk.check_schema,
    talk.check_code,
    talk.check_hostile_output,
    talk.check_server_error,
    talk.check_context,
    handling.check_long,
    handling.check_reasoning,
    handling.check_edit_keys,
    handling.check_settings,
    kept.check_background,
    kept.check_address,
    kept.check_kept,
    kept.check_unanswered,
    kept.check_drafts_of_messages,
    kept.check_deleted,
    kept.check_deleted_elsewhere,
    kept.check_arriving_elsewhere,
    kept.check_menu_keys,
    kept.check_too_long,
    kept.check_list,
    kept.check_files,
)
SEE = (
    see.check_live,
    see.check_keyboard,
    see.check_owner,
    see.check_node,
    see.check_tree,
    see.check_explain,
    see.check_phone,
    see.check_pause,
)
_RUN_UNITS = """
async (base) => {
  const failed = [];
  let count = 0;
  const check = (name, passed) => { count += 1; if (!passed) failed.push(name); };
  const equal = (name, found, wanted) => {
    const [one, other] = [JSON.stringify(found), JSON.stringify(wanted)];
    check(one === other ? name : `${name}: ${one} is not ${other}`, one === other);
  };
  await TESTS({ load: (path) => import(base + path), check, equal });
  return { count, failed };
}
"""


@dataclass
class Report:
    """Results by check, and figures. failed: names of checks that failed."""

    checks: dict[str, str | None] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    begin: float = field(default_factory=time.perf_counter)

    def note(self, name: str, error: str | None = None) -> None:
        """Record a check, with the error if it failed."""
        self.checks[name] = error
        took, self.begin = time.perf_counter() - self.begin, time.perf_counter()
        print(f"{'failed' if error else 'ok    '} {took:5.1f} s  {name}{f': {error}' if error else ''}", flush=True)

    def attempt(self, name: str, check: Callable[[], object]) -> None:
        """Run a check that raises if it fails."""
        try:
            check()
        except Exception as error:  # any error of a check is its result
            self.note(name, " ".join(str(error).split())[:600] or type(error).__name__)
        else:
            self.note(name)

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [name for name, error in self.checks.items() if error]


def first_line(check: Callable[..., object]) -> str:
    """What a check is about."""
    return (check.__doc__ or check.__name__).splitlines()[0].rstrip(".")


def check_sizes(report: Report) -> None:
    """The compressed size of all files of the page."""
    files = {path.relative_to(ASSETS).as_posix(): path for path in sorted(ASSETS.rglob("*")) if path.is_file()}
    sizes = {name: len(gzip.compress(path.read_bytes())) for name, path in files.items()}
    total = sum(sizes.values())
    report.figures["compressed_bytes"] = total
    report.figures["compressed_bytes_of_libraries"] = sum(size for name, size in sizes.items() if "vendor/" in name)
    report.note(f"page and libraries are below {MOST_BYTES} bytes", None if total < MOST_BYTES else f"{total} bytes")


def check_first_paint(report: Report, started: Browser, url: str, num_tries: int) -> None:
    """Seconds until the first contentful paint, and until the view can be used; the least of some tries."""
    paints, ready = [], []
    for _ in range(num_tries):
        begin = time.perf_counter()
        with watched(started, url) as seen:
            seen.page.wait_for_selector("#composer")
            ready.append(time.perf_counter() - begin)
            script = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"
            paints.append(float(seen.page.evaluate(script)))
    report.figures |= {"first_paint_s": round(min(paints), 3), "first_use_s": round(min(ready), 3)}
    error = None if min(paints) < MOST_SECONDS else f"{min(paints):.2f} s"
    report.note(f"the first paint comes within {MOST_SECONDS:g} s", error)


def check_units(report: Report, page: Page, url: str) -> None:
    """The tests of single modules."""
    result = page.evaluate(_RUN_UNITS.replace("TESTS", f"({UNITS.read_text().strip()})"), f"{url}/page/")
    report.figures["unit_checks"] = result["count"]
    report.note("tests of the page's modules", "; ".join(result["failed"]) or None)


def check_many_blocks(report: Report, page: Page, url: str) -> None:
    """The time of an update of 100,000 blocks."""
    times = page.evaluate(MANY_BLOCKS.read_text(), f"{url}/page/")
    report.figures |= {f"{name}_100000_blocks_ms": round(times[name], 1) for name in ("apply", "draw")}
    error = None if times["apply"] + times["draw"] < MOST_MS else str(times)
    report.note("an update of 100,000 blocks is drawn in time", error)
    page.reload()


@contextmanager
def kept_clean(report: Report, name: str, seen: Any, *expected: str) -> Iterator[None]:  # noqa: ANN401
    """After the checks: no request left the server, and no error but the expected ones was logged."""
    yield
    report.note(f"{name}: every request of the browser went to the server", "; ".join(seen.strangers) or None)
    unexpected = "; ".join(seen.unexpected(*expected)[:5])
    report.note(f"{name}: no error of a script or of the content security policy", unexpected or None)


def check_accessibility(report: Report, page: Page, name: str) -> None:
    """Note the grave findings of axe, and count all."""
    found = findings(page)
    report.figures.setdefault("axe", {})[name] = {"grave": len(grave(found)), "all": [one["id"] for one in found]}
    errors = [f"{one['id']}: {one['help']} {one['elements']}" for one in grave(found)]
    report.note(f"axe has no serious finding: {name}", "; ".join(errors)[:1500] or None)


def short_conversation(page: Page) -> None:
    """A conversation that shows what Talk has."""
    talk.say(page, "How much is the lantern?")
    talk.say(page, "Sum: 6 6 24 /think")
    page.click(".message.assistant >> text=Regenerate >> nth=-1")
    talk.done(page)


def picture_whole(page: Page, width: int, path: Path) -> None:
    """A picture of the whole view, also of what is scrolled out of sight."""
    height = page.evaluate("document.querySelector('main').scrollHeight + document.querySelector('.top').clientHeight")
    page.set_viewport_size({"width": width, "height": height + 60})
    page.wait_for_timeout(600)
    page.screenshot(path=str(path))


def look_at(report: Report, started: Browser, url: str, pictures: Path | None, *, is_short: bool) -> None:
    """axe and pictures of both views, in each size and both colour schemes."""
    for size, (width, height) in SIZES.items():
        if is_short and size != "wide":
            continue
        with watched(started, url, width=width, height=height) as seen:
            page = seen.page
            short_conversation(page)
            talk.show_tokens(page)
            page.hover(".token-text .token >> nth=6")
            look_in_schemes(report, page, f"talk_{size}", pictures)
            page.goto(f"{url}/#/see")
            page.wait_for_selector(".status[data-status=live]")
            page.wait_for_timeout(500 if is_short else 6000)
            look_in_schemes(report, page, f"see_{size}", pictures)
            if pictures:
                picture_whole(page, width, pictures / f"see_{size}_whole.png")


def look_in_schemes(report: Report, page: Page, name: str, pictures: Path | None) -> None:
    """axe and a picture of what a page shows, dark and light."""
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.wait_for_timeout(300)
        check_accessibility(report, page, f"{name}_{scheme}")
        if pictures:
            page.screenshot(path=str(pictures / f"{name}_{scheme}.png"))


def check_servers(report: Report, started: Browser, pictures: Path | None, *, is_short: bool) -> None:
    """All checks against a server without keys, then those of keys. Both servers start at the same time."""
    serve = ("serve", "--port", "0", *servers.SMALL)
    with (
        tempfile.TemporaryDirectory() as folder,
        servers.running(*serve) as open_server,
        servers.running(*serve, "--api-key-file", str(servers.key_file(Path(folder)))) as server_with_keys,
    ):
        url, url_with_keys = open_server.url(), server_with_keys.url()
        check_first_paint(report, started, url, 2 if is_short else 5)
        with watched(started, url) as seen, kept_clean(report, "talk", seen, "status of 400"):
            check_units(report, seen.page, url)
            report.note("Markdown has its styles", "; ".join(styles.wrong_styles(seen.page, url)) or None)
            check_many_blocks(report, seen.page, url)
            for check in TALK:
                report.attempt(first_line(check), lambda check=check: check(seen))
        for alone in (handling.check_touch, kept.check_undo):
            report.attempt(first_line(alone), lambda alone=alone: alone(started, url))
        check_documentation(report, started, url, pictures)
        with watched(started, url, path="#/see") as seen:
            report.attempt(first_line(see.check_idle), lambda: see.check_idle(seen))
        with servers.load(url, 8 if is_short else 24):
            with watched(started, url, path="#/see") as seen, kept_clean(report, "see", seen):
                for check in SEE:
                    report.attempt(first_line(check), lambda check=check: check(seen))
            look_at(report, started, url, pictures, is_short=is_short)
        report.attempt("keys", lambda: [report.note(name) for name in talk.check_keys(started, url_with_keys)])


def check_documentation(report: Report, started: Browser, url: str, pictures: Path | None) -> None:
    """The page `/docs`, which renders the OpenAPI document."""
    with watched(started, url, path="docs") as seen, kept_clean(report, "docs", seen):
        report.attempt("docs shows the routes", lambda: seen.page.get_by_text("/v1/chat/completions").first.wait_for())
        look_in_schemes(report, seen.page, "docs", pictures)


def check_journal(report: Report, started: Browser, pictures: Path | None) -> None:
    """A journal that was just recorded, played in the page."""
    with tempfile.TemporaryDirectory() as folder:
        journal = servers.recorded_journal(Path(folder))
        with (
            servers.running("replay", str(journal), "--page", "--port", "0") as server,
            watched(started, server.url()) as seen,
            kept_clean(report, "replay", seen),
        ):
            report.attempt(first_line(see.check_replay), lambda: see.check_replay(seen))
            check_accessibility(report, seen.page, "replay")
            if pictures:
                seen.page.screenshot(path=str(pictures / "replay_wide_light.png"))


def main() -> int:
    """Run the checks. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="what CI runs")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the page")
    parser.add_argument("--json", type=Path, help="file for the results")
    asked = parser.parse_args()
    report, begin = Report(), time.perf_counter()
    if asked.pictures:
        asked.pictures.mkdir(parents=True, exist_ok=True)
    check_sizes(report)
    report.note("each class of a style sheet is one of the page", "; ".join(styles.unknown_classes(ASSETS)) or None)
    try:
        with browser() as started:
            report.figures["browser"] = f"Chromium {started.version}"
            check_servers(report, started, asked.pictures, is_short=asked.short)
            if not asked.short:
                check_journal(report, started, asked.pictures)
    except NoBrowser as error:
        print(error, file=sys.stderr)
        return 2
    report.figures["seconds"] = round(time.perf_counter() - begin, 1)
    if asked.json:
        write_result(asked.json, {"quire": quire.__version__, **report.figures, "checks": report.checks})
    for name in report.failed:
        print(f"failed: {name}: {report.checks[name]}")
    print(f"{len(report.checks) - len(report.failed)} passed, {len(report.failed)} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
