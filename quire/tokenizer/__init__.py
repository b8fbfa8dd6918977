"""Text: tokens, templates, and what is written with them. Knows no engine and no HTTP."""
