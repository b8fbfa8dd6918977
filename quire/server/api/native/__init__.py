"""quire's own routes: tokenize, health, administration, explanations, programs."""
