"""How model families write reasoning and tool calls: formats as data, one incremental parser, constraints for calls."""
