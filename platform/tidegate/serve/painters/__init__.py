"""What makes pictures out of a loaded folder: step by step where the network is one that we know, else as a whole."""
