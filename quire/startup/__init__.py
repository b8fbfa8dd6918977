"""Engine startup: model files, hardware, memory plan, calibration, assembly."""
