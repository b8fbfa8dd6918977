"""JSON Schema as the other structured-output backends read it: supported keywords, values, bounds."""
