"""The pages under docs/ are run: what they show is what they print, and what they name exists."""

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.model_configs import deepseek_v32, glm_5_2, write_config
from tests.support.pages import read_blocks, run_page
from tests.support.source_trees import PACKAGES, ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
# measured once, on data and machines that are not here
MEASURED = {"plan-and-replay.md", "benchmarks.md"}
READMES = [ROOT / "packages" / package.replace("_", "-") / "README.md" for package in PACKAGES]
NAME = re.compile(r"`((?:bt_width|bt_tables|bt_builders|bt_runner)(?:\.\w+)+)`")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
FILE = re.compile(r"`((?:\w+/)+\w+\.(?:py|md|toml))`")
ROW = re.compile(r"^\| `([\w.]+)` \| (.+?) \|", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
VLLM_NAMES = [
    "MultiGroupBlockTable",
    "BlockTable",
    "SlotMappingMode",
    "BlockTables",
    "StagedWriteTensor",
    "init_block_table_layout_tensors",
    "blocks_per_kv_block",
    "append_block_ids",
    "init_attn_backend",
    "prepare_kernel_block_sizes",
    "select_common_block_size",
    "_reshape_kv_cache",
    "AttentionGroup.create_metadata_builders",
    "map_to_kernel_block_table",
    "AttentionMetadataBuilder",
    "DeepseekV32IndexerMetadataBuilder",
    "EagleSpeculator.set_attn",
    "get_block_table_width",
    "CommonAttentionMetadata",
    "requires_block_table_width",
]
VLLM_SPECS = [
    "KVCacheSpec",
    "AttentionSpec",
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "RSWASpec",
    "SinkFullAttentionSpec",
    "ChunkedLocalAttentionSpec",
    "SlidingWindowSpec",
    "SlidingWindowMLASpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "CircularBufferSpec",
    "HiSparseHotSpec",
    "HiSparseResidentSpec",
    "MambaSpec",
    "UniformTypeKVCacheSpecs",
    "TQFullAttentionSpec",
    "HiddenStateCacheSpec",
]


def exists(name: str) -> bool:
    """Whether a dotted name can be imported, or is an attribute of what can."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page", [page for page in PAGES + READMES if page.name not in MEASURED], ids=name_of
)
def test_a_page_prints_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what its Python writes stays out of the checkout
    monkeypatch.chdir(tmp_path)

    assert run_page(page.read_text(encoding="utf-8")) == []


def test_the_page_of_plans_prints_what_it_shows(tmp_path: Path) -> None:
    """Its first part; the second, about replays, shows figures of a machine."""
    page = (ROOT / "docs" / "plan-and-replay.md").read_text(encoding="utf-8")
    plans, heading, _ = page.partition("## `bt-runner replay`")
    (tmp_path / "GLM-5.2").mkdir()
    write_config(tmp_path / "GLM-5.2", glm_5_2())

    assert heading
    assert run_page(plans, tmp_path) == []


def test_the_plan_of_a_published_model_is_what_the_readme_shows(tmp_path: Path) -> None:
    """The command of the runner's README that needs nothing but a config."""
    blocks = read_blocks(READMES[-1].read_text(encoding="utf-8"))
    (plan,) = [block.text for block in blocks if block.text.startswith("$ bt-runner plan")]
    (tmp_path / "DeepSeek-V3.2").mkdir()
    write_config(tmp_path / "DeepSeek-V3.2", deepseek_v32())

    assert run_page(f"```console\n{plan}```\n", tmp_path) == []


@pytest.fixture(scope="module")
def demo_lines() -> list[str]:
    """What the demo prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "bt_runner", "demo", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("page", [ROOT / "README.md", READMES[-1]], ids=name_of)
def test_the_demo_prints_what_the_readmes_show(page: Path, demo_lines: list[str]) -> None:
    """The groups and their blocks to the letter; elsewhere all but numbers, the machine's own."""
    (shown,) = [
        block.text.removeprefix("$ bt-runner demo\n").splitlines()
        for block in read_blocks(page.read_text(encoding="utf-8"))
        if "bt-runner demo on cpu, float64" in block.text
    ]
    end = demo_lines.index("", 2)

    assert shown[:end] == demo_lines[:end]
    assert without_numbers(shown[end + 1]) == without_numbers(demo_lines[end + 1])
    assert shown[-5:-4] == [""]
    assert list(map(without_numbers, shown[-4:])) == list(map(without_numbers, demo_lines[-4:]))
    assert shown[-2] == demo_lines[-2]


def without_numbers(line: str) -> str:
    """A line with a sign for each number, and one space between words."""
    return " ".join(NUMBER.sub("#", line).split())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_of_a_page_is_of_a_kind_that_is_checked(page: Path) -> None:
    languages = {block.language for block in read_blocks(page.read_text(encoding="utf-8"))}

    assert languages <= {"python", "text", "console"}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_a_link_leads_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))

    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_a_readme_links_nothing_that_its_index_page_lacks(page: Path) -> None:
    """An index shows the README alone: no file of the repository stands beside it."""
    assert LINK.findall(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("```python\nprint(2)\n```\n```text\n3\n```\n", id="another-output"),
        pytest.param("```python\nprint(2)\n```\nNo output shown.\n", id="no-output"),
        pytest.param("```console\n$ echo 2\n3\n```\n", id="another-output-of-a-command"),
    ],
)
def test_a_page_that_shows_something_else_is_seen(page: str) -> None:
    """The test above can fail."""
    assert [difference.line for difference in run_page(page)] == [1]


def test_a_page_that_shows_what_it_prints_is_accepted() -> None:
    """Names are kept from block to block; a text elsewhere is a drawing."""
    page = (
        "```text\na drawing\n```\n```python\na = 2\n```\n```text\na drawing\n```\n"
        "```python\nprint(a)\n```\n```text\n2\n```\n```console\n$ echo \\\n  2\n2\n```\n"
    )

    assert run_page(page) == []


def test_every_module_has_its_line_in_the_architecture() -> None:
    """Its line is the module's own first one: ``tools/module_lines.py --write`` copies it."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "module_lines.py")],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_name_on_a_page_exists(page: Path) -> None:
    """Modules and what is in them, by their full names."""
    names = set(NAME.findall(page.read_text(encoding="utf-8")))

    assert [name for name in sorted(names) if not exists(name)] == []


@pytest.mark.parametrize("page", [*PAGES, *READMES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_a_file_that_a_page_names_is_there(page: Path) -> None:
    """From the root of the tree, of a package, or of its sources."""
    places = [ROOT, *ROOT.glob("packages/*/src"), *ROOT.glob("packages/*/src/*")]
    named = set(FILE.findall(page.read_text(encoding="utf-8")))

    assert [
        name for name in sorted(named) if not any((place / name).exists() for place in places)
    ] == []


def test_a_name_that_does_not_exist_is_seen() -> None:
    """The test above can fail."""
    assert exists("bt_width.BlockTableLayout.locate")
    assert not exists("bt_width.BlockTableLayout.find")
    assert not exists("bt_width.pages")


@pytest.mark.parametrize("name", [*VLLM_NAMES, *VLLM_SPECS])
def test_every_name_of_vllm_has_its_row(name: str) -> None:
    """What it is here, or that it is not offered and what to use."""
    rows = dict(ROW.findall((ROOT / "docs" / "coming-from-vllm.md").read_text(encoding="utf-8")))

    assert name in rows
    assert NAME.search(rows[name]) or rows[name].startswith(("not offered", "(no such", "the same"))
