"""Checks of kept conversations: answers that go on elsewhere, addresses, reloads, drafts, deleting, files."""

import json
import re
from pathlib import Path

from playwright.sync_api import Browser, Page, Route, expect

from tools.page_check.browser import Watched, watched
from tools.page_check.talk import LONG, done, long_answers, say, second_tab, start_long

MARK = ".chats .arriving"
LEFT = re.compile("stopped|not complete")  # whether the page still saw its stream break off
LENGTH = 2_000_001  # characters: one more than the page keeps
A_LONG_ANSWER = 'data: {"choices": [{"delta": {"content": "%s"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n' % (
    "x" * LENGTH
)


def text_of_answer(page: Page) -> str:
    """The text of the last answer."""
    return page.locator(".message.assistant .markdown").last.inner_text()


def act(page: Page, label: str, place: int = 0) -> None:
    """Choose an action of a conversation of the list."""
    item = page.locator(".chats li").nth(place)
    item.hover()
    item.locator(".more").click()
    item.get_by_role("button", name=label, exact=True).click()


def check_background(seen: Watched) -> None:
    """Answers go on while others are shown, in other conversations and other branches, and are marked."""
    page = seen.page
    page.click("text=New conversation")
    with long_answers(page):
        start_long(page)
        page.click("text=New conversation")
        expect(page.locator(MARK)).to_have_count(1)
        expect(page.locator(".composer button[aria-label='Send']")).to_be_visible()
        start_long(page)
        expect(page.locator(MARK)).to_have_count(2)
        page.click(".chat-link >> nth=1")
        before = text_of_answer(page)
        page.wait_for_function(
            "(length) => document.querySelector('.growing .markdown').textContent.length > length", arg=len(before)
        )
        page.keyboard.press("Escape")
        done(page)
        expect(page.locator(".message.assistant .figures")).to_contain_text("stopped")
        expect(page.locator(MARK)).to_have_count(1)
        page.click(
            ".chat-link >> nth=0" if page.locator(".chats li:nth-child(1) .arriving").count() else ".chat-link >> nth=1"
        )
        page.locator(".message.user").get_by_text("Edit", exact=True).click()
        page.fill(".edit textarea", "Sort: carpet hammer deer")
        page.keyboard.press("Control+Enter")
        done(page)
        expect(page.locator(MARK)).to_have_count(1)
        page.click("button[aria-label='Previous branch']")
        expect(page.locator(".growing")).to_have_count(1)
        page.click(".composer button[aria-label='Stop']")
        done(page)
        expect(page.locator(MARK)).to_have_count(0)


def check_address(seen: Watched) -> None:
    """A conversation has an address: a reload shows it again, Back goes to the one before."""
    page = seen.page
    page.click("text=New conversation")
    say(page, "How much is the lantern?")
    first = page.url
    page.click("text=New conversation")
    assert page.url.endswith("#/talk"), page.url
    say(page, "How much is the shovel?")
    page.click(".chat-link >> nth=1")
    expect(page.locator(".message.user .plain")).to_have_text("How much is the lantern?")
    assert page.url == first, page.url
    page.reload()
    expect(page.locator(".message.user .plain")).to_have_text("How much is the lantern?")
    page.go_back()
    expect(page.locator(".message.user .plain")).to_have_text("How much is the shovel?")
    page.click("nav.views >> text=See")
    page.click("nav.views >> text=Talk")
    expect(page.locator(".message.user .plain")).to_have_text("How much is the shovel?")
    page.evaluate("location.hash = '#/talk/unknown'")
    expect(page.locator(".welcome")).to_be_visible()
    expect(page.locator(".history-foot .note")).to_contain_text("does not keep")


def check_kept(seen: Watched) -> None:
    """An answer that is left by a reload is kept as far as it came, and marked."""
    page = seen.page
    page.click("text=New conversation")
    with long_answers(page):
        start_long(page)
        before = text_of_answer(page)
        page.reload()
        expect(page.locator(".message.user .plain")).to_have_text(f"{LONG} {LONG} {LONG}")
        expect(page.locator(".message.assistant .figures")).to_contain_text(LEFT)
        assert text_of_answer(page).startswith(before)
        expect(page.locator(".error")).to_have_count(0)


def check_unanswered(seen: Watched) -> None:
    """A message without an answer can be answered: one whose answer was stopped, or left, before it had any text."""
    page = seen.page
    page.click("text=New conversation")
    held: list[Route] = []  # requests that get no answer
    page.route("**/v1/chat/completions", lambda route: held.append(route), times=1)
    say(page, "How much is the lantern?", wait=False)
    page.reload()
    expect(page.locator(".message")).to_have_count(1)
    page.get_by_role("button", name="Answer", exact=True).click()
    done(page)
    expect(page.locator(".message.assistant .markdown")).to_contain_text("11 coins")
    page.route("**/v1/chat/completions", lambda route: held.append(route), times=1)
    page.click(".message.assistant >> text=Regenerate")
    other = second_tab(page)  # it has what is kept, as after a crash
    expect(other.locator(".message.assistant .markdown")).to_contain_text("11 coins")
    expect(other.get_by_role("button", name="Answer", exact=True)).to_have_count(0)
    other.close()
    page.reload()
    assert len(held) == 2, held
    for route in held:
        route.abort()


def check_drafts_of_messages(seen: Watched) -> None:
    """Each conversation has its own draft, which a reload keeps."""
    page = seen.page
    page.click("text=New conversation")
    say(page, "How much is the lantern?")
    page.fill("#composer", "and the shovel")
    page.click("text=New conversation")
    expect(page.locator("#composer")).to_have_value("")
    expect(page.locator("#composer")).to_be_focused()
    page.click(".chat-link >> nth=0")
    page.reload()
    expect(page.locator("#composer")).to_have_value("and the shovel")
    page.fill("#composer", "")


def start_in_new(page: Page) -> int:
    """Begin a long answer in a new conversation. Returns the number of conversations before."""
    page.click("text=New conversation")
    before = page.locator(".chat-link").count()
    start_long(page)
    expect(page.locator(".chat-link")).to_have_count(before + 1)
    return before


def check_deleted(seen: Watched) -> None:
    """A conversation that is deleted while its answer arrives is not kept again, until the deleting is undone."""
    page = seen.page
    with long_answers(page):
        before = start_in_new(page)
        act(page, "Delete")
        done(page)
        page.wait_for_timeout(300)  # a deleted one would be kept by now
        expect(page.locator(".chat-link")).to_have_count(before)
        page.click("text=Undo")
        expect(page.locator(".chat-link")).to_have_count(before + 1)
        expect(page.locator(".message.assistant .figures")).to_contain_text("stopped")
        act(page, "Delete")
        page.reload()
        expect(page.locator(".chat-link")).to_have_count(before)


def check_deleted_elsewhere(seen: Watched) -> None:
    """A conversation that another tab deletes while its answer arrives is not kept again."""
    page = seen.page
    with long_answers(page):
        before = start_in_new(page)
        other = second_tab(page)
        expect(other.locator(".chat-link")).to_have_count(before + 1)
        act(other, "Delete")
        done(page)
        expect(page.locator(".welcome")).to_be_visible()
        expect(page.locator(".history-foot .note")).to_contain_text("Another tab has deleted")
        page.wait_for_timeout(300)  # a deleted one would be kept by now
        expect(page.locator(".chat-link")).to_have_count(before)
        other.click("text=Undo")
        expect(page.locator(".chat-link")).to_have_count(before + 1)
        act(other, "Delete")
        other.close()


ADD_ANSWER = """({content, partial}) => {
    const key = `quire.chat.${location.hash.slice('#/talk/'.length)}`;
    const kept = JSON.parse(localStorage.getItem(key));
    const nodes = kept.nodes.filter((node) => !['asked', 'answer'].includes(node.id));
    nodes.push({id: 'asked', parent: nodes.at(-1).id, role: 'user', content: 'And the shovel?'});
    const figures = {tokens: 2, rate: null, first: null, prompt: null, cached: null};
    nodes.push({id: 'answer', parent: 'asked', role: 'assistant', content, reasoning: '', partial, figures});
    localStorage.setItem(key, JSON.stringify({...kept, nodes}));
}"""  # as the tab does in which the answer arrives


def check_arriving_elsewhere(seen: Watched) -> None:
    """Messages that another tab adds are shown; an answer that arrives there grows here until it is complete."""
    page = seen.page
    page.click("text=New conversation")
    say(page, "How much is the lantern?")
    other = second_tab(page)
    answer = other.locator(".message.assistant").last
    expect(answer).to_contain_text("11 coins")
    page.evaluate(ADD_ANSWER, {"content": "The shovel", "partial": True})
    expect(answer.locator(".markdown")).to_have_text("The shovel")
    expect(answer.locator(".figures")).to_contain_text("not complete")
    page.evaluate(ADD_ANSWER, {"content": "The shovel costs", "partial": True})
    expect(answer.locator(".markdown")).to_have_text("The shovel costs")
    page.evaluate(ADD_ANSWER, {"content": "The shovel costs 9 coins."})
    expect(answer.locator(".markdown")).to_have_text("The shovel costs 9 coins.")
    expect(answer.locator(".figures")).not_to_contain_text("not complete")
    expect(other.locator(".message")).to_have_count(4)
    other.close()
    page.click("text=New conversation")


def check_menu_keys(seen: Watched) -> None:
    """Escape closes the actions of a conversation and does not stop the answer that arrives."""
    page = seen.page
    page.click("text=New conversation")
    with long_answers(page):
        start_long(page)
        page.locator(".chats li .more").first.click()
        page.locator(".chat-actions button").first.focus()
        page.keyboard.press("Escape")
        expect(page.locator(".chat-actions")).to_have_count(0)
        expect(page.locator(".chats li .more").first).to_be_focused()
        expect(page.locator(".growing")).to_have_count(1)
        page.keyboard.press("Escape")
        done(page)


def check_too_long(seen: Watched) -> None:
    """A conversation that is too long to be kept can be exported; Undo shows it again after Delete all."""
    page = seen.page
    page.click("text=New conversation")
    say(page, "How much is the lantern?")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=A_LONG_ANSWER), times=1)
    say(page, "Say x.", wait=False)
    expect(page.locator(".history-foot .note")).to_contain_text("too long to be kept")
    done(page)
    with page.expect_download() as saved:
        page.click("text=Export all")
    assert len(Path(saved.value.path()).read_text()) > LENGTH
    act(page, "Delete")
    expect(page.locator(".welcome")).to_be_visible()
    page.click("text=Undo")
    expect(page.locator(".message")).to_have_count(4)
    page.click("text=New conversation")


def check_list(seen: Watched) -> None:
    """Conversations are renamed and found by their words."""
    page = seen.page
    page.click("text=New conversation")
    say(page, "How much is the shovel?")
    page.click("text=New conversation")
    say(page, "How much is the lantern?")
    act(page, "Rename")
    page.fill(".rename", "Prices of Fernhill")
    page.keyboard.press("Enter")
    expect(page.locator(".chat-title")).to_have_text("Prices of Fernhill")
    page.keyboard.press("Control+k")
    page.keyboard.type("fernhill")
    expect(page.locator(".chat-link")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator(".chat-link")).not_to_have_count(1)
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".welcome")).to_be_visible()


def check_undo(started: Browser, url: str) -> None:
    """Undo brings back all that was deleted shortly before, stays while it has the focus, and hands it to the list."""
    with watched(started, url) as seen:  # whose clock no other check has
        page = seen.page
        for item in ("shovel", "lantern"):
            page.click("text=New conversation")
            say(page, f"How much is the {item}?")
        page.clock.install()
        act(page, "Delete", 1)
        act(page, "Delete")
        expect(page.locator(".chat-link")).to_have_count(0)
        expect(page.locator(".undo span")).to_have_text("Deleted: 2 conversations")
        page.clock.run_for(11_000)
        expect(page.locator(".undo button")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator(".chat-link")).to_have_count(2)
        expect(page.locator(".chat-link:focus")).to_have_count(1)
        expect(page.locator(".undo button")).to_have_count(0)
        act(page, "Delete")
        page.focus("#composer")
        page.clock.run_for(11_000)
        expect(page.locator(".undo button")).to_have_count(0)


def check_files(seen: Watched) -> None:
    """What Export wrote is imported after Delete all; another file gets a message."""
    page = seen.page
    page.click(".chat-link >> nth=0")
    shown = page.locator(".message").all_inner_texts()
    number = page.locator(".chat-link").count()
    with page.expect_download() as saved:
        page.click("text=Export all")
    exported = Path(saved.value.path()).read_text()
    with page.expect_download() as one:
        act(page, "Export")
    assert len(json.loads(Path(one.value.path()).read_text())) == 1
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("text=Delete all")
    expect(page.locator(".chat-link")).to_have_count(0)
    note = page.locator(".history-foot .note")
    looped = [{"id": "a", "nodes": [{"id": "b", "parent": "b", "role": "user", "content": ""}], "chosen": [["b", "b"]]}]
    for wrong in ("no JSON", '{"a": 1}', json.dumps(looped)):
        give_file(page, wrong)
        expect(note).to_contain_text("Import reads what Export wrote")
    expect(page.locator(".chat-link")).to_have_count(0)
    page.fill("#set-system", "mine")
    foreign = {"id": "a", "system": "theirs", "nodes": [{"id": "b", "parent": "", "role": "user", "content": "x"}]}
    give_file(page, json.dumps(foreign))
    page.click(".chat-link")
    expect(page.locator("#set-system")).to_have_value("theirs")
    page.click("text=New conversation")
    expect(page.locator("#set-system")).to_have_value("")
    act(page, "Delete")
    give_file(page, exported)
    expect(note).to_contain_text(f"Imported: {number} conversations.")
    expect(page.locator(".chat-link")).to_have_count(number)
    page.click(".chat-link >> nth=0")
    assert [text.split("\n")[0] for text in page.locator(".message").all_inner_texts()] == [
        text.split("\n")[0] for text in shown
    ]


def give_file(page: Page, text: str) -> None:
    """Import a file with a text."""
    page.set_input_files(
        ".history-foot input[type=file]", {"name": "a.json", "mimeType": "application/json", "buffer": text.encode()}
    )
