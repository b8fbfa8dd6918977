"""Updates of the state of scheduler and cache, for viewers. Computed only while there are viewers."""
