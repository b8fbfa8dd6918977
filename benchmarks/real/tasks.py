"""Eight tasks of a chat model on real text, with two questions each."""

import shlex
import textwrap

from benchmarks.real.model import chat_ids
from benchmarks.real.texts import gpl, python_reference, source
from quire.tokenizer.tokenizer import Tokenizer


def tasks(tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """Task -> token ids of its prompts. All are chats, except those of `continuation`."""
    paragraphs = [part for part in gpl().split("\n\n") if len(part) > 300]
    asked = {
        "summary": [f"Summarize this text in three sentences.\n\n{paragraphs[i]}" for i in (3, 20)],
        "extraction": [
            f"Copy the sentences of this text that contain the word {word!r}.\n\n{text}"
            for word, text in (("software", "\n".join(paragraphs[1:4])), ("object", python_reference("objects")[:1500]))
        ],
        "code edit": [
            f"Rename the variable {old!r} to {new!r}. Write the whole code.\n\n```python\n{source(code)}```"
            for old, new, code in (("prefix", "start", textwrap.indent), ("s", "text", shlex.quote))
        ],
        "question on a document": [
            f"{python_reference(name)[:1500]}\n\n{question}"
            for name, question in (
                ("with", "In which order are the steps of a with statement executed?"),
                ("assert", "What does an assert statement do, and what does the optimization option change?"),
            )
        ],
        "JSON": [
            "Write a JSON array with an object for each of these files. The keys are name, kind and size.\n\n" + files
            for files in (
                "report.pdf, a document, 120 KB\nholiday.jpg, a picture, 2400 KB\nsong.mp3, music, 5100 KB\n"
                "notes.txt, a text, 3 KB",
                "main.py, a program, 8 KB\nlogo.png, a picture, 45 KB\ndata.csv, a table, 900 KB\n"
                "talk.mp4, a film, 81000 KB",
            )
        ],
        "chat": ["How can I sleep better?", "Tell me about the history of Rome."],
        "list": ["Write a numbered list of 20 animals.", "List the months of the year with their number of days."],
    }
    prompts = {
        task: [chat_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]
        for task, texts in asked.items()
    }
    prefixes = (gpl()[6000:8000], source(shlex.split))
    return prompts | {"continuation": [tokenizer.encode(text) for text in prefixes]}
