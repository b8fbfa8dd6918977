"""From a model and a machine to the parts of an engine: memory plan, calibration, assembly."""
