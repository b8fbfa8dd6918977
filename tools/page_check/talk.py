"""Checks of Talk: a chat, a stop, branches, tokens, tools, a schema, hostile output, keys."""

import ast
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, Route, expect

from tools.page_check.browser import Watched, watched
from tools.page_check.servers import ADMIN_KEY, KEY, OTHER_KEY, load

LONG = "Write a story with Zoe and the shovel."
ARRIVAL_RATE = 100_000  # bytes per second: about 120 tokens with their probabilities


def say(page: Page, text: str, *, wait: bool = True) -> None:
    """Send a message; wait for the whole answer."""
    page.fill("#composer", text)
    page.keyboard.press("Enter")
    if wait:
        done(page)


def done(page: Page) -> None:
    """Wait until no answer is being generated."""
    expect(page.locator(".composer button[aria-label='Send']")).to_be_visible()
    expect(page.locator(".growing")).to_have_count(0)


def show_tokens(page: Page) -> None:
    """Switch the last answer to its tokens."""
    page.get_by_role("button", name="Tokens", exact=True).last.click()


def check_chat(seen: Watched) -> None:
    """An answer with its figures; the second one uses the cached tokens of the first."""
    page = seen.page
    say(page, "How much is the lantern?")
    expect(page.locator(".message.assistant .markdown")).to_contain_text("11 coins")
    say(page, "How much is the shovel?")
    figures = page.locator(".message.assistant .figures").last.inner_text()
    cached = int(figures.split(" of ")[0].split()[-1].replace(",", ""))
    assert cached > 14, figures
    assert "first after" in figures, figures


def without_end(route: Route) -> None:
    """Let the model go on after its end of text."""
    route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True})


def second_tab(page: Page) -> Page:
    """Another tab with the address of this one."""
    with page.context.expect_page() as opened:
        page.evaluate("window.open(location.href, '_blank')")
    return opened.value


@contextmanager
def long_answers(page: Page) -> Iterator[None]:
    """Answers have up to 1,500 tokens, and arrive so slowly that the checks act before they are complete."""
    page.fill("#set-max_tokens", "1500")
    network = page.context.new_cdp_session(page)
    rates = {"offline": False, "latency": 0, "downloadThroughput": ARRIVAL_RATE, "uploadThroughput": -1}
    network.send("Network.emulateNetworkConditions", rates)
    try:
        yield
    finally:
        network.detach()  # the browser's network is as fast as before
    page.fill("#set-max_tokens", "")


def start_long(page: Page) -> None:
    """Begin an answer that goes on to its limit of tokens, and wait for its first words."""
    page.route("**/v1/chat/completions", without_end, times=1)
    say(page, f"{LONG} {LONG} {LONG}", wait=False)
    page.wait_for_function("() => document.querySelector('.growing .markdown')?.textContent.length > 10")


def check_stop(seen: Watched) -> None:
    """The button and Escape stop an answer, which stays as far as it came; Enter does not stop it."""
    page = seen.page
    with long_answers(page):
        for by_key in (False, True):
            start_long(page)
            expect(page.locator(".growing .figures")).to_contain_text("tokens/s")
            expect(page.locator(".growing .actions")).to_have_count(0)
            page.keyboard.press("Enter")
            if by_key:
                page.keyboard.press("Escape")
            else:
                page.click(".composer button[aria-label='Stop']")
            done(page)
            expect(page.locator(".message.assistant").last).to_contain_text("stopped")
            expect(page.locator(".message.assistant .figures").last).to_contain_text("tokens/s")
            page.click("text=New conversation")


def check_branches(seen: Watched) -> None:
    """Regenerate and edit make branches, which can be switched and are kept over a reload."""
    page = seen.page
    page.click("text=New conversation")
    say(page, "Repeat: olive stove tin")
    page.click(".message.assistant >> text=Regenerate")
    done(page)
    expect(page.locator(".message.assistant .switch")).to_contain_text("2/2")
    page.click(".message.user >> text=Edit")
    page.fill(".edit textarea", "Reverse: stove tin mango")
    page.click("text=Send as a new branch")
    done(page)
    expect(page.locator(".message.assistant .markdown")).to_contain_text("mango tin stove")
    page.click("button[aria-label='Previous branch']")
    expect(page.locator(".message.user .plain")).to_have_text("Repeat: olive stove tin")
    say(page, LONG, wait=False)
    page.locator(".message.user").first.get_by_text("Edit", exact=True).click()
    page.fill(".edit textarea", "Sort: carpet hammer deer")
    page.click("text=Send as a new branch")
    done(page)
    expect(page.locator(".message.assistant .markdown")).to_contain_text("carpet deer hammer")
    page.click("button[aria-label='Previous branch']")
    page.click("button[aria-label='Previous branch']")
    page.reload()
    expect(page.locator(".message.user .switch").first).to_contain_text("1/3")


def check_tokens(seen: Watched) -> None:
    """Tokens with probabilities and alternatives, by pointer and by keyboard."""
    page = seen.page
    page.click("text=New conversation")
    say(page, "Sum: 6 6 24 /think")
    expect(page.locator(".reasoning summary")).to_be_visible()
    show_tokens(page)
    page.hover(".token-text .token >> nth=5")
    expect(page.locator(".token-readout tr")).to_have_count(5)
    page.focus(".token-text")
    page.keyboard.press("Home")
    expect(page.locator(".token-readout b")).to_have_text("<think>")
    page.set_viewport_size({"width": 1440, "height": 420})
    page.locator(".token-text").evaluate("text => text.scrollIntoView({block: 'start'})")
    expect(page.locator(".token-readout")).to_be_in_viewport(ratio=0.95)
    page.set_viewport_size({"width": 1440, "height": 900})


def check_each_token_once(seen: Watched) -> None:
    """The tokens of an answer with reasoning and drafts are as many as the server counts."""
    page = seen.page
    for _ in range(6):  # the text at the end of the reasoning often comes apart from its tokens
        page.click("text=New conversation")
        say(page, "Sum: 6 6 24 /think")
        counted = page.locator(".message.assistant .figures").inner_text().split(" tokens")[0]
        show_tokens(page)
        assert page.locator(".token-text .token").count() == int(counted), counted


def check_drafts(seen: Watched) -> None:
    """Accepted drafts are marked, as many as the server counts."""
    page = seen.page
    page.click("text=New conversation")
    bodies = []

    def read(route: Route) -> None:
        response = route.fetch()
        bodies.append(response.text())
        route.fulfill(response=response)

    page.route("**/v1/chat/completions", read, times=1)
    say(page, "Repeat: olive stove tin olive stove tin olive stove tin olive stove tin")
    events = [line[6:] for line in bodies[0].splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    drafted = sum(len(choice["drafted"]) for choice in choices)
    assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) > drafted, drafted
    show_tokens(page)
    assert page.locator(".token-text .draft").count() == drafted


def check_two_tabs(seen: Watched) -> None:
    """Branches that two tabs add to one conversation are both kept."""
    page = seen.page
    page.click("text=New conversation")
    say(page, "Sort: carpet hammer deer")
    other = second_tab(page)
    expect(other.locator(".message.assistant .markdown")).to_contain_text("carpet")
    for tab in (other, page):
        tab.click(".message.assistant >> text=Regenerate")
        done(tab)
    other.fill("#set-system", "Be brief.")
    expect(page.locator("#set-system")).to_have_value("Be brief.")
    other.close()
    page.click(".message.assistant >> text=Regenerate")
    done(page)
    expect(page.locator(".message.assistant .switch")).to_contain_text("4/4")
    page.reload()
    expect(page.locator(".message.assistant .switch")).to_contain_text("4/4")
    expect(page.locator("#set-system")).to_have_value("Be brief.")
    page.fill("#set-system", "")


def check_tools(seen: Watched) -> None:
    """A call is shown, the person types its result, the model answers with it."""
    page = seen.page
    page.click("text=New conversation")
    page.fill("#set-tools", "not JSON")
    expect(page.locator("#problem-tools")).to_contain_text("not JSON")
    page.click(".json-field:has(#set-tools) >> text=Example")
    page.select_option("#set-tool_choice", "required")
    page.fill("#set-temperature", "0")
    say(page, "Check what the carpet costs.")
    expect(page.locator(".call b")).to_have_text("get_price")
    page.select_option("#set-tool_choice", "auto")
    page.fill(".call textarea", '{"price": 7}')
    page.click("text=Send results")
    done(page)
    expect(page.locator(".message.assistant").last).to_contain_text("7")
    page.click(".json-field:has(#set-tools) >> text=Clear")


def check_schema(seen: Watched) -> None:
    """An answer by a JSON schema is JSON of that schema."""
    page = seen.page
    page.click("text=New conversation")
    page.click(".json-field:has(#set-schema) >> text=Example")
    say(page, "Faye took 18 white ladders on Thursday.\nJSON keys: count, day, name")
    answer = json.loads(page.locator(".message.assistant .markdown").inner_text())
    assert set(answer) == {"name", "day", "count"}, answer
    page.click(".json-field:has(#set-schema) >> text=Clear")
    page.fill("#set-temperature", "")


def check_code(seen: Watched) -> None:
    """A request as curl, and as Python that can be parsed."""
    page = seen.page
    page.click(".message.assistant >> text=Request")
    assert page.locator("dialog pre").inner_text().startswith("curl -N http")
    page.click("dialog >> text=Python")
    ast.parse(page.locator("dialog pre").inner_text())
    page.click("dialog button[aria-label=Close]")
    page.fill("#set-seed", "7")
    page.click(".message.assistant >> text=Request")
    assert '"seed"' not in page.locator("dialog pre").inner_text(), "not the request of the answer"
    page.click("dialog button[aria-label=Close]")
    page.fill("#set-seed", "")


def check_hostile_output(seen: Watched) -> None:
    """HTML of a message stays text, bad links are no links, nothing is loaded."""
    page = seen.page
    hostile = (
        "<img src=x onerror=alert(1)><script>alert(2)</script> [a](javascript:alert(3)) ![i](http://example.org/a.png) "
        "[b](https://example.org/) <a href='https://example.org' style='color:red'>c</a> **bold** `<b>code</b>`"
    )
    page.click(".message.assistant >> text=Edit")
    page.fill(".edit textarea", hostile)
    page.click("text=Keep as a new branch")
    shown = page.locator(".message.assistant .markdown")
    assert shown.locator("img, script, [style]").count() == 0
    hrefs = shown.locator("a").evaluate_all("links => links.map((a) => [a.getAttribute('href'), a.rel, a.target])")
    assert [href for href, _, _ in hrefs] == ["http://example.org/a.png", "https://example.org/"], hrefs
    assert all("noopener" in rel and target == "_blank" for _, rel, target in hrefs), hrefs
    expect(shown.locator("strong")).to_have_text("bold")
    expect(shown.locator("code")).to_have_text("<b>code</b>")
    expect(shown).to_contain_text("<script>alert(2)</script>")


def check_server_error(seen: Watched) -> None:
    """An error of the server is shown with its message; the page itself refuses numbers out of range."""
    page = seen.page
    page.click("text=New conversation")
    page.fill("#set-temperature", "1000")
    expect(page.locator("#problem-temperature")).to_have_text("It goes from 0 to 100.")
    page.fill("#composer", "Hello!")
    page.keyboard.press("Enter")
    expect(page.locator(".message")).to_have_count(0)
    page.fill("#set-temperature", "")

    def too_hot(route: Route) -> None:
        route.continue_(post_data={**route.request.post_data_json, "temperature": 1000})

    page.route("**/v1/chat/completions", too_hot, times=1)
    say(page, "Hello!")
    expect(page.locator(".message .error")).to_contain_text("temperature")


def check_context(seen: Watched) -> None:
    """The gauge counts the tokens of the conversation; a prompt that is too long gets advice."""
    page = seen.page
    page.click("text=New conversation")
    expect(page.locator(".gauge")).to_be_hidden()
    say(page, "How much is the lantern?")
    expect(page.locator(".gauge")).to_have_text(re.compile(r"^\d+ of 2,048 tokens$"))
    say(page, "lantern tin " * 1500)
    expect(page.locator(".message .error")).to_contain_text("begin a new conversation")


def check_keys(started: Browser, url: str) -> Iterator[str]:
    """A server with keys: a wrong one, a tenant's, none any more, an admin's. Yields what was checked."""
    with watched(started, url) as seen:
        page = seen.page
        expect(page.locator("dialog.key")).to_be_visible()
        for _ in range(3):
            page.keyboard.press("Escape")
        expect(page.locator("dialog.key")).to_be_visible()
        yield "the question for a key stays after Escape"
        page.fill("#key", "☃")
        page.click("text=Use this key")
        expect(page.locator("#key-problem")).to_contain_text("characters that no key has")
        page.fill("#key", "wrong")
        page.click("text=Use this key")
        expect(page.locator("#key-problem")).to_contain_text("does not know this key")
        yield "a wrong key is refused with a message"
        use_key(page, KEY)
        say(page, "How much is the lantern?")
        expect(page.locator(".message.assistant .markdown")).to_contain_text("coins")
        assert KEY not in page.evaluate("JSON.stringify(localStorage)")
        yield "the right key opens Talk, and is in sessionStorage only"
        with load(url, 4, OTHER_KEY):
            page.click("nav.views >> text=See")
            expect(page.locator(".legend .swatch.other")).to_be_visible()
            counted = re.compile(r"Others, every 5 s: [1-4] running")
            expect(page.locator(".queue .panel-head")).to_contain_text(counted, timeout=12_000)  # one count more
            assert page.locator(".requests.running tbody tr").count() == 0
            yield "a tenant sees its own requests, and counts of others"
            page.click("text=Forget key")
            use_key(page, ADMIN_KEY)
            expect(page.locator(".requests.running tbody tr")).not_to_have_count(0)
            yield "a forgotten key is asked for again, and an admin sees all requests"
        assert seen.unexpected("401") == [], seen.errors


def use_key(page: Page, key: str) -> None:
    """Type a key into the dialog that asks for it."""
    page.fill("#key", key)
    page.click("text=Use this key")
    expect(page.locator("#key")).to_have_count(0)
