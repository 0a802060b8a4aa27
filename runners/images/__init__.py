"""Handles images in prompts with mlx-vlm (extra `vlm`): files, the model's processor and its vision
tower.

Nothing here imports data, rewards or training. mlx-vlm and Pillow are imported inside functions.
"""
