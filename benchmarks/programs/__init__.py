"""What it is worth that the scheduler knows the program: the same requests with hints and without."""
