"""The diffusion-transformer loop that runs in each rank."""
