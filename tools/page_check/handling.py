"""Checks of how Talk is handled: keys, a phone, a long answer, the settings."""

from playwright.sync_api import Browser, expect

from tools.page_check.browser import Watched, watched
from tools.page_check.talk import done, long_answers, say, start_long


def check_long(seen: Watched) -> None:
    """A long answer is followed, unless the person scrolls up; a button goes back to the end."""
    page = seen.page
    page.click("text=New conversation")
    with long_answers(page):
        start_long(page)
        page.wait_for_function("() => document.querySelector('.growing .markdown').scrollHeight > 1500")
        from_end = "(log) => log.scrollHeight - log.scrollTop - log.clientHeight"
        log = page.locator(".log")
        expect(page.locator(".jump")).to_be_hidden()
        assert log.evaluate(from_end) < 80
        log.evaluate("(log) => { log.scrollTop = 40; }")
        expect(page.locator(".jump")).to_be_visible()
        page.keyboard.press("Escape")
        done(page)
        assert log.evaluate("(log) => log.scrollTop") == 40
        page.click(".jump")
        assert log.evaluate(from_end) < 80
        expect(page.locator(".jump")).to_be_hidden()


def check_reasoning(seen: Watched) -> None:
    """Reasoning that arrives shows its seconds and its last line."""
    page = seen.page
    page.click("text=New conversation")
    page.evaluate("""() => {
      window.lastLines = new Set();
      new MutationObserver(() => window.lastLines.add(document.querySelector('.growing .last-line')?.textContent))
        .observe(document.body, {subtree: true, childList: true, characterData: true});
    }""")
    with long_answers(page):
        say(page, "Sum: 26 36 24 /think")
    assert page.evaluate("[...window.lastLines].filter(Boolean).length") > 1
    expect(page.locator(".reasoning summary")).to_contain_text("Reasoning, ")
    expect(page.locator(".last-line")).to_have_text("")


def check_edit_keys(seen: Watched) -> None:
    """Escape leaves a message as it was."""
    page = seen.page
    page.locator(".message.user").get_by_text("Edit", exact=True).click()
    page.fill(".edit textarea", "something else")
    page.keyboard.press("Escape")
    expect(page.locator(".edit")).to_have_count(0)
    expect(page.locator(".message.user .plain")).to_have_text("Sum: 26 36 24 /think")


def check_settings(seen: Watched) -> None:
    """The settings can be hidden, also over a reload. A field has a hint, and shows the value that applies to it."""
    page = seen.page
    expect(page.locator("#set-temperature")).to_have_attribute("placeholder", "0.7")  # the model's
    expect(page.locator("#set-min_p")).to_have_attribute("placeholder", "0")
    page.focus("#set-top_k")
    expect(page.locator("#hint-top_k")).to_be_visible()
    page.click(".settings .closer")
    expect(page.locator(".settings")).to_be_hidden()
    page.reload()
    expect(page.locator("#composer")).to_be_visible()
    expect(page.locator(".settings")).to_be_hidden()
    page.click("button[aria-label='Settings']")
    expect(page.locator(".settings")).to_be_visible()


def check_touch(started: Browser, url: str) -> None:
    """On a phone Enter begins a line, the button sends, and the tabs give room while a message is typed."""
    with watched(started, url, width=390, height=844, is_touch=True) as seen:
        page = seen.page
        expect(page.locator("#model")).to_be_hidden()
        page.tap("#composer")
        expect(page.locator("nav.views")).to_be_hidden()
        page.keyboard.type("How much is")
        page.keyboard.press("Enter")
        page.keyboard.type("the lantern?")
        expect(page.locator("#composer")).to_have_value("How much is\nthe lantern?")
        page.tap(".composer button[aria-label='Send']")
        done(page)
        expect(page.locator(".message.assistant .markdown")).not_to_be_empty()
        page.get_by_role("button", name="Tokens", exact=True).tap()
        page.tap(".token-text .token >> nth=0")
        expect(page.locator(".token-readout tr")).to_have_count(5)
        expect(page.locator("nav.views")).to_be_visible()
        sizes = page.locator("input, select, textarea").evaluate_all(
            "all => all.map((one) => [one.id, parseFloat(getComputedStyle(one).fontSize)])"
        )
        assert [name for name, size in sizes if size < 16] == [], sizes
        assert page.locator("html").evaluate("(html) => html.scrollWidth - html.clientWidth") == 0
        page.tap("button[aria-label='Conversations']")
        page.tap(".chats .more")
        page.tap(".chats .delete")
        page.tap("text=Undo")
        expect(page.locator(".message.user .plain")).to_have_text("How much is\nthe lantern?")
        assert seen.errors == [], seen.errors
