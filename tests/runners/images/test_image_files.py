"""A row's images are paths or bytes; invalid ones and models without vision are refused."""

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from runners import cli
from runners.config.loading import load_config
from runners.errors import UserError
from runners.images.image_files import ImageFile, image_files, image_size, read_image
from runners.images.processor import check_family
from runners.machine.startup import Platform
from runners.training.setup import SetUp
from tests.support.commands import grpo
from tests.support.tiny_models import make_model_folder
from tests.support.vision_models import vision_settings, without_mlx_vlm
from tests.support.vision_runs import write_vision_data, write_vision_run

pytest.importorskip("PIL")


@pytest.fixture
def picture(tmp_path):
    """pics/a.png, 3 rows of 5 pixels."""
    from PIL import Image

    (tmp_path / "pics").mkdir()
    Image.new("L", (5, 3), 200).save(tmp_path / "pics" / "a.png")
    return tmp_path / "pics" / "a.png"


def image_fault(value, folder):
    """The error for a row's images."""
    with pytest.raises(UserError) as caught:
        image_files(value, folder)
    return str(caught.value)


def test_paths_are_relative_to_the_data(tmp_path, picture):
    """One path, several, and absolute ones are accepted; empty values contain no image."""
    one = ImageFile("pics/a.png", path=tmp_path / "pics" / "a.png")
    assert image_files("pics/a.png", tmp_path) == (one,)
    assert image_files(["pics/a.png", None, ["pics/a.png"]], tmp_path) == (one, one)
    assert image_files(str(picture), tmp_path)[0].path == picture
    for nothing in (None, "", [], ()):
        assert image_files(nothing, tmp_path) == ()
    assert image_size(one) == (3, 5)
    assert read_image(one).mode == "RGB"


def test_bytes_are_images_too(tmp_path, picture):
    """The Hub's data sets and Parquet files contain bytes; without a path, a digest is the name."""
    data = picture.read_bytes()
    (named,) = image_files({"bytes": data, "path": "b.png"}, tmp_path)
    assert named.name == "b.png" and image_size(named) == (3, 5)
    (plain,), (other,) = image_files(data, tmp_path), image_files({"bytes": data, "path": None}, tmp_path)
    assert plain == other and len(plain.name) == 16
    (by_path,) = image_files({"bytes": None, "path": "pics/a.png"}, tmp_path)
    assert by_path.path == picture


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("pics/b.png", "names 'pics/b.png', but there is no file"),
        ("pics", "names 'pics', but there is no file"),
        (3, "found int"),
        (["pics/a.png", 3.5], "found float"),
        ("a\0b", "names"),
        ("x" * 5000, "names"),
    ],
)
def test_values_that_are_not_image_paths_are_refused(tmp_path, picture, value, message):
    """The error describes the value in one line."""
    fault = image_fault(value, tmp_path)
    assert message.replace("'", '"') in fault.replace("'", '"') and "\n" not in fault


def test_files_that_are_not_images_are_refused(tmp_path, picture):
    """The error names the file; truncated images are refused too."""
    (tmp_path / "text.png").write_text("no image")
    (text,) = image_files("text.png", tmp_path)
    with pytest.raises(UserError, match=r"text\.png: cannot be read as an image"):
        image_size(text)
    from PIL import Image

    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(buffer, "PNG")
    (cut,) = image_files(buffer.getvalue()[:900], tmp_path)
    assert image_size(cut) == (64, 64)
    with pytest.raises(UserError, match="cannot be read as an image"):
        read_image(cut)


def test_no_path_leads_out_of_the_folder(tmp_path, picture):
    """Paths with .., absolute paths and links are refused; the folder itself may be a link."""
    inner = tmp_path / "data"
    inner.mkdir()
    (inner / "link.png").symlink_to(picture)
    (inner / "circle.png").symlink_to(inner / "circle.png")
    for value in ("../pics/a.png", str(picture), "link.png", "~/a.png"):
        assert f"is outside {inner}, but images are only read inside" in image_fault(value, inner)
    assert "names" in image_fault("circle.png", inner)
    (tmp_path / "way").symlink_to(tmp_path / "pics")
    assert image_files("a.png", tmp_path / "way")
    assert "expected bytes, or data.image_folder" in image_fault("a.png", None)


def test_only_images_of_known_forms_and_sizes_are_read(tmp_path):
    """PostScript would start a program, and a small file may contain a huge image."""
    from PIL import Image

    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    (tmp_path / "b.png").write_bytes(b"P6 2 2 255 " + bytes(12))  # PPM, which Pillow would read
    for name in ("a.png", "b.png"):
        with pytest.raises(UserError, match="cannot be read as an image"):
            image_size(*image_files(name, tmp_path))
    Image.new("1", (12_000, 10_000)).save(tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size < 1 << 16
    with pytest.raises(UserError, match=r"c\.png: cannot be read .*size \(120000000 pixels\)"):
        image_size(*image_files("c.png", tmp_path))


def test_pictures_stand_upright(tmp_path):
    """Cameras store rotated pixels and the orientation in EXIF."""
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (5, 3)).save(tmp_path / "a.png", exif=exif)
    (file,) = image_files("a.png", tmp_path)
    assert image_size(file) == (5, 3) and read_image(file).size == (3, 5)


def test_a_missing_image_is_named_with_its_row(tmp_path):
    """Training and check report it before they read the model."""
    write_vision_data(tmp_path)
    make_model_folder(tmp_path / "model")
    config = write_vision_run(tmp_path)
    (tmp_path / "pics" / "4.png").unlink()
    line = f'{tmp_path / "train.jsonl"}, line 5: image names "pics/4.png", but there is no file'
    for result in (grpo("check", config, code=2), CliRunner().invoke(cli.run_command, [str(config)])):
        assert result.exit_code == 2 and line in result.output and "data.on_bad_row" in result.output


def test_a_model_without_a_vision_part_is_refused(tmp_path):
    """Training, check and eval name the supported types in one line."""
    write_vision_data(tmp_path)
    make_model_folder(tmp_path / "model")
    config = write_vision_run(tmp_path)
    for arguments in (["check", config], ["eval", tmp_path / "model", "--config", config]):
        line = grpo(*arguments, code=2).stderr.strip().splitlines()[-1]
        assert "config.json has no vision_config" in line and "qwen2_vl and qwen2_5_vl" in line
    with pytest.raises(UserError, match=r"config\.json has no vision_config"):
        SetUp(load_config(str(config)).check(), Platform("cpu")).build()
    other = {"model_type": "llava", "vision_config": {"depth": 2}}
    with pytest.raises(
        UserError, match=r'expected a model of .*, found model_type "llava" \(data.image = ""'
    ):
        check_family(other, tmp_path)


def test_without_mlx_vlm_one_line_says_how_to_install_it(tmp_path, monkeypatch):
    """The line appears before weights are read."""
    write_vision_data(tmp_path)
    folder = make_model_folder(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(vision_settings()))
    (folder / "preprocessor_config.json").write_text("{}")
    without_mlx_vlm(monkeypatch)
    result = grpo("check", write_vision_run(tmp_path), code=2)
    assert result.output.count("\n") == 1
    assert "prompts with images require mlx-vlm: pip install -e '.[vlm]'" in result.output


def test_several_ranks_are_refused(tmp_path):
    """The error appears before any file is read."""

    two: Any = SimpleNamespace(is_alone=False, count=2)
    write_vision_data(tmp_path)
    make_model_folder(tmp_path / "model")
    config = load_config(str(write_vision_run(tmp_path)))
    with pytest.raises(
        UserError, match=r"data\.image: training on prompts with images is only possible on one rank, found 2"
    ):
        SetUp(config.check(), Platform("cpu"), ranks=two).build()
