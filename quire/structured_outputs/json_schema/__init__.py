"""The JSON schema reader of the llguidance backend."""
