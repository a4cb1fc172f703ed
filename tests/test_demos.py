"""The demo runner: what it takes for a block, what it runs, how it fails, and that it leaves no process behind."""

import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests import demos


def found(text: str) -> list[tuple[int, str]]:
    return list(demos.blocks(dedent(text)))


def test_only_marked_blocks_run():
    text = """
        ```sh
        no
        ```
        ```sh runny
        no
        ```
        ```sh run
        one
          two
        ```
        ```python
        'an apostrophe
        ```
        ~~~ sh run
        three
        ~~~
        """
    assert found(text) == [(8, "one\n  two"), (15, "three")]


def test_shorter_fences_inside_a_longer_one_are_text():
    text = """
        ````markdown
        ```sh run
        no
        ```
        ````
        ````sh run
        cat <<'EOF'
        ```
        EOF
        ````
        ~~~text
        ```sh run
        ~~~
        a line with ``` in it, and ```sh run``` in line
        ```sh run
        last
        `````
        """
    assert found(text) == [(7, "cat <<'EOF'\n```\nEOF"), (16, "last")]


def test_a_block_in_a_list_loses_its_indentation():
    assert found("- item\n\n  ```sh run\n  one\n    two\n\n  ```\n") == [(3, "one\n  two\n")]


@pytest.mark.parametrize(
    ("info", "short"),
    [
        ("""sh run short="make train ARGS='--train.steps 3'" """, "make train ARGS='--train.steps 3'"),
        ("sh run short=true", "true"),
        ("sh run", "body"),
    ],
)
def test_a_short_form_replaces_the_body(info, short):
    assert found(f"```{info}\nbody\n```") == [(1, short)]


@pytest.mark.parametrize("text", ["```sh run\nbody\n", "```sh run shrot=x\n```", "```sh run short=\n```"])
def test_a_fence_that_is_wrong_is_named(text):
    with pytest.raises(ValueError, match="line 2: "):
        found(f"text\n{text}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in {
        "README.md": "```sh run\necho root\n```",
        "docs/a.md": "```sh run\necho docs\n```",
        "ddp/README.md": "```sh run\necho ddp\n```",
        "ddp/__main__.py": "print('demo of ddp')",
        "nd_mesh/README.md": "no block",
        "nd_mesh/__main__.py": "raise SystemExit('a command, no demo')",
        ".venv/README.md": "```sh run\nfalse\n```",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def named(root: Path, folder: str = "") -> list[str]:
    return [item.name for item in demos.items(root, folder)]


def test_demos_come_first_and_a_folder_limits(root):
    blocks = ["README.md:1: echo root", "docs/a.md:1: echo docs", "ddp/README.md:1: echo ddp"]
    assert named(root) == ["python -m ddp", *blocks]
    assert named(root, "ddp") == ["python -m ddp", blocks[2]]
    assert named(root, "docs") == blocks[1:2]
    assert named(root, "nd_mesh") == []


def test_a_wrong_fence_is_reported_with_its_document(root):
    (root / "README.md").write_text("```")
    with pytest.raises(ValueError, match=r"README\.md: line 1"):
        demos.items(root)


def test_all_pass(root, capsys):
    assert demos.run_all(demos.items(root), root) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ✓ ")[0] for line in lines[:-1]] == named(root)
    assert lines[-1] == "4 passed, 0 failed"


def block(root: Path, text: str) -> list[demos.Item]:
    (root / "docs/a.md").write_text(f"```sh run\n{text}\n```")
    return demos.items(root, "docs")


@pytest.mark.parametrize("last", ["exit 3", "false | true", "echo $NONE", "false; true"])
def test_a_failure_shows_the_end_of_its_output_and_the_others_go_on(root, capsys, last):
    chosen = [*block(root, f"seq 100\necho oops >&2\n{last}"), *demos.items(root, "ddp")]
    assert demos.run_all(chosen, root) == 1
    failed, *lines = capsys.readouterr().out.splitlines()
    assert failed.startswith("docs/a.md:1: seq 100 ✗ ")
    assert "    oops" in lines[:40]
    assert [line.strip() for line in lines if line.strip().isdigit()][-1] == "100"
    assert "    60" not in lines
    assert lines[-1] == "2 passed, 1 failed"


def test_our_python_and_no_variables_of_an_outer_make(root, capsys, monkeypatch):
    monkeypatch.setenv("MAKEFLAGS", " -- FOLDER=ddp")
    monkeypatch.setenv("FOLDER", "ddp")
    code = "import os, sys; print(sys.executable, os.getcwd(), {'FOLDER', 'MAKEFLAGS'} & set(os.environ))"
    demos.run_all(block(root, f'python -c "{code}"; cat; exit 1'), root)
    assert f"    {sys.executable} {root} set()\n" in capsys.readouterr().out


def alive(pid: str) -> bool:
    """Whether this process still runs: a zombie has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except FileNotFoundError:
        return False


LEAVE = """
sleep 99 & echo $! >> pids
setsid sleep 99 & echo $! >> pids
(trap '' TERM; sleep 99) & echo $! >> pids
"""


@pytest.mark.parametrize(
    ("last", "end"),
    [
        ("sleep 99", "\n    (cut after 1 s)\n0 passed, 1 failed\n"),
        ("exit 3", "\n    (exit status 3)\n0 passed, 1 failed\n"),
        ("true", " s\n1 passed, 0 failed\n"),
    ],
)
def test_no_process_is_left(root, capsys, last, end):
    status = demos.run_all(block(root, f"{LEAVE}\n{last}"), root, limit=1)
    printed = capsys.readouterr().out
    assert printed.endswith(end)
    assert (status, "✓" in printed, "✗" in printed) == ((0, True, False) if last == "true" else (1, False, True))
    pids = (root / "pids").read_text().split()
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids)
