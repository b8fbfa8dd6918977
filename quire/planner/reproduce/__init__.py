"""The figures that papers and articles report about serving engines, from quire's own code."""
