"""Checks of See: blocks that move under load, the tree, an explanation, the timeline, a journal."""

import re

from playwright.sync_api import Page, expect

from tools.page_check.browser import Watched


def picture(page: Page, selector: str) -> str:
    """What a canvas shows, to be compared."""
    return str(page.evaluate(f"document.querySelector({selector!r}).toDataURL()"))


def check_idle(seen: Watched) -> None:
    """Without requests the page says so, and leads to Talk."""
    page = seen.page
    expect(page.locator(".queue .empty")).to_contain_text("No requests yet")
    expect(page.locator(".queue .requests").first).to_be_hidden()
    page.click(".queue .empty a")
    expect(page.locator("#composer")).to_be_visible()


def check_phone(seen: Watched) -> None:
    """On a phone nothing is wider than the screen, and the table of running requests fits."""
    page = seen.page
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("() => document.querySelector('.requests.running tbody tr')")
    wider = "(element) => element.scrollWidth - element.clientWidth"
    assert page.locator("html").evaluate(wider) == 0
    assert page.locator(".requests.running .table").evaluate(wider) == 0
    assert page.locator(".node-detail").evaluate("(element) => element.scrollHeight - element.clientHeight") == 0
    page.set_viewport_size({"width": 1440, "height": 900})


def check_live(seen: Watched) -> None:
    """Under load, blocks and tree change, and requests are listed."""
    page = seen.page
    expect(page.locator(".status")).to_have_text("Live")
    expect(page.locator(".queue tbody tr")).not_to_have_count(0)
    for canvas in (".blocks-canvas", ".tree-canvas", ".steps-canvas"):
        before = picture(page, canvas)
        page.wait_for_function(f"(before) => document.querySelector({canvas!r}).toDataURL() !== before", arg=before)
    expect(page.locator("#blocks-summary")).to_contain_text("in use")


def check_keyboard(seen: Watched) -> None:
    """Blocks, nodes and steps are read out by keyboard."""
    page = seen.page
    for panel, canvas in (("blocks", ".blocks-canvas"), ("tree", ".tree-canvas"), ("steps", ".steps-canvas")):
        page.focus(canvas)
        page.keyboard.press("ArrowRight")
        expect(page.locator(f".panel.{panel} .readout")).not_to_be_empty()


def check_owner(seen: Watched) -> None:
    """The pointer on a request shows its blocks, and the pointer on a block its request."""
    page = seen.page
    page.click("text=Pause")
    page.wait_for_timeout(1200)  # until nothing flashes
    before = picture(page, ".blocks-canvas")
    page.hover(".requests.running tbody tr >> nth=0")
    assert picture(page, ".blocks-canvas") != before
    page.hover("h1")
    assert picture(page, ".blocks-canvas") == before
    page.click("text=Go on")


def check_node(seen: Watched) -> None:
    """A node of the tree shows its text."""
    page = seen.page
    page.click(".reused button >> nth=0")
    expect(page.locator(".node-detail pre")).not_to_be_empty()


def check_tree(seen: Watched) -> None:
    """The tree zooms by keyboard, and the slider shows it as it was."""
    page = seen.page
    page.click("text=Back")
    page.focus(".tree-canvas")
    before = picture(page, ".tree-canvas")
    page.keyboard.press("+")
    assert picture(page, ".tree-canvas") != before
    page.keyboard.press("0")
    page.wait_for_function("() => Number(document.querySelector('.slider input').max) >= 3")
    page.locator(".slider input").fill("0")
    expect(page.locator(".slider output")).to_contain_text("ago")
    page.wait_for_timeout(300)
    before = picture(page, ".tree-canvas")
    page.wait_for_timeout(800)
    assert picture(page, ".tree-canvas") == before, "the tree of a past time changes"
    page.click("text=Now")
    expect(page.locator(".slider output")).to_have_text("now")


def check_explain(seen: Watched) -> None:
    """A request of the list is explained in words."""
    page = seen.page
    page.wait_for_function("() => document.querySelector('.queue button.link')")
    page.evaluate("document.querySelector('.queue button.link').click()")
    drawer = page.locator(".drawer")
    expect(drawer.locator("h3 >> text=Reuse of the cache")).to_be_visible()
    expect(drawer).to_contain_text("From token")
    page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()


def check_pause(seen: Watched) -> None:
    """A paused view asks for no updates."""
    page = seen.page
    page.click("text=Pause")
    expect(page.locator(".status")).to_have_text("Paused")
    page.wait_for_timeout(300)
    before = picture(page, ".steps-canvas")
    page.wait_for_timeout(800)
    assert picture(page, ".steps-canvas") == before
    page.click("text=Go on")
    expect(page.locator(".status")).to_have_text("Live")


def check_replay(seen: Watched) -> None:
    """A journal plays, and goes forwards and backwards to the same pictures."""
    page = seen.page
    place = page.locator(".replay-bar output")
    expect(place).to_contain_text("step 1 of")
    page.focus("main")
    for _ in range(3):
        page.keyboard.press("PageDown")
    expect(place).to_contain_text("step 193 of")
    page.wait_for_function("() => document.querySelector('#blocks-summary').textContent")
    page.wait_for_timeout(1500)
    summary, steps = page.locator("#blocks-summary").inner_text(), picture(page, ".steps-canvas")
    page.keyboard.press("ArrowLeft")
    expect(place).to_contain_text("step 192 of")
    page.keyboard.press("ArrowRight")
    expect(place).to_contain_text("step 193 of")
    page.wait_for_timeout(1500)
    assert page.locator("#blocks-summary").inner_text() == summary
    assert picture(page, ".steps-canvas") == steps
    page.click(".reused button >> nth=0")
    expect(page.locator(".node-detail pre")).to_have_text(re.compile(r"^\d+( \d+)*$"))
    page.get_by_role("button", name="Play", exact=True).click()
    page.wait_for_timeout(600)
    page.click("text=Pause")
    assert "step 193" not in place.inner_text()
