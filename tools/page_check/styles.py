"""Checks of the style sheets: each class is one that the page makes, and Markdown looks like Markdown."""

import re
from pathlib import Path

from playwright.sync_api import Page

COMPOSED = {
    "align-": "a column's alignment, in talk/markdown.js",
    "node-": "a node's state, in see/tree.js",
    "part-": "a part of a bar, in see/explain.js",
    "step-": "a kind of tokens, in see/timeline.js",
}
"""Beginnings of classes that are put together in JavaScript, which has them as `align-${...}`."""

MARKDOWN = "1. one\n2. two\n   - inner\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n```js\nlet a;\n```\n\n> said\n\n`code`"
WANTED = {
    "ol": {"listStyleType": "decimal", "paddingLeft": "23.25px"},
    "ol ul": {"listStyleType": "disc"},
    "table": {"borderCollapse": "collapse"},
    "td": {"borderTopStyle": "solid"},
    "td.align-right": {"textAlign": "right"},
    "pre code": {"fontSize": "13.5px"},
    "blockquote": {"borderLeftStyle": "solid"},
    "p > code": {"borderTopLeftRadius": "5px"},
}
"""Computed styles by selector."""

_STYLES = """
async ([base, text, wanted]) => {
  const { MarkdownView } = await import(`${base}/page/talk/markdown.js`);
  const view = new MarkdownView();
  document.body.append(view.element);
  view.show(text);
  const found = {};
  for (const [selector, styles] of Object.entries(wanted)) {
    const element = view.element.querySelector(selector);
    const computed = element && getComputedStyle(element);
    found[selector] = Object.fromEntries(Object.keys(styles).map((name) => [name, computed && computed[name]]));
  }
  view.element.remove();
  return found;
}
"""


def unknown_classes(folder: Path) -> list[str]:
    """Classes of style sheets that no script and no document of the page has, with the file."""
    own = [path for path in folder.rglob("*") if "vendor" not in path.parts]
    sources = "\n".join(path.read_text() for path in own if path.suffix in (".js", ".html"))
    known = set(re.findall(r"[A-Za-z][\w-]*", sources)) | {
        f"{start}$" for start in COMPOSED if f"{start}${{" in sources
    }
    found = []
    for path in sorted(own):
        if path.suffix != ".css":
            continue
        sheet = re.sub(r"/\*.*?\*/|\{[^{}]*\}", " ", path.read_text(), flags=re.DOTALL)
        for name in sorted(set(re.findall(r"\.([A-Za-z][\w-]*)", sheet))):
            is_composed = any(name.startswith(start) and f"{start}$" in known for start in COMPOSED)
            if name not in known and not is_composed:
                found.append(f"{path.name}: .{name}")
    return found


def wrong_styles(page: Page, url: str) -> list[str]:
    """Where rendered Markdown does not look as it should."""
    found = page.evaluate(_STYLES, [url, MARKDOWN, WANTED])
    return [f"{name}: {found[name]}, not {styles}" for name, styles in WANTED.items() if found[name] != styles]
