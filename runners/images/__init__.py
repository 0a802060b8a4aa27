"""Images in prompts: files, the model's processor and its vision tower, with mlx-vlm (extra `vlm`).

Imports no data, rewards or training. mlx-vlm and Pillow are imported inside functions.
"""
