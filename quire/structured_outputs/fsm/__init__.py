"""quire's own grammar backend: patterns as minimal automata over bytes, their token masks, and the text they force."""
