"""The JSON schema reader of the llguidance and xgrammar backends."""
