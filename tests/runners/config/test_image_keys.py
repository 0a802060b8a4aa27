"""data.image, and what it does not go together with."""

import pytest

from runners.config.loading import load_config
from runners.errors import ConfigError

BASE = ["data.source=embedded", "data.image=picture"]


def test_images_are_off_by_default():
    """And a column's name turns them on."""
    assert load_config("quickstart").data.image == ""
    assert load_config("quickstart", BASE).data.image == "picture"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env.factory=calculator", r'env\.factory: found "calculator" with data\.image, want ""'),
        ("loss.router_aux_coef=0.1", r"loss\.router_aux_coef: found 0\.1 with data\.image, want 0\.0"),
    ],
)
def test_what_prompts_with_images_cannot_be_together_with(override, message):
    """Each names its key, what was found and what is wanted."""
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", [*BASE, override])


def test_a_bound_on_pixels_wants_images():
    """A key that nothing would read."""
    with pytest.raises(ConfigError, match=r"data\.image_max_pixels: found 1000, want 0, or the column"):
        load_config("quickstart", ["data.image_max_pixels=1000"])
    with pytest.raises(ConfigError, match=r"data\.image_max_pixels: found -1, want an integer of at least 0"):
        load_config("quickstart", [*BASE, "data.image_max_pixels=-1"])


def test_the_folder_of_images_has_to_be_there(tmp_path):
    """It is found beside the config, as all paths are."""
    (tmp_path / "pics").mkdir()
    (tmp_path / "train.toml").write_text(
        '[model]\npath = "embedded"\n[data]\nsource = "embedded"\nimage = "p"\nimage_folder = "pics"\n'
    )
    assert load_config(str(tmp_path / "train.toml")).data.image_folder == str(tmp_path / "pics")
    with pytest.raises(ConfigError, match=r"data\.image_folder: no such folder: \"pisc\""):
        load_config(str(tmp_path / "train.toml"), ["data.image_folder=pisc"])
    with pytest.raises(ConfigError, match=r'data\.image_folder: found "[^"]*pics", want "", or the column'):
        load_config(str(tmp_path / "train.toml"), ["data.image="])
