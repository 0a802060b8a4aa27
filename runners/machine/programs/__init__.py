"""What MLX compiles while a run is on, compiled before it is needed."""
