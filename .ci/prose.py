"""Checks of the repository's English, and random samples of it for an editor.

python .ci/prose.py check          list comments and docstrings that begin without a noun; status 1 if there are any
python .ci/prose.py width          list lines of prose above 120 columns in pages; status 1 if there are any
python .ci/prose.py sample SEED    draw 60 docstrings, 60 comments, 60 messages and 60 sentences of pages, as Markdown
"""

import ast
import io
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

# Openings of sentences that lack their noun, such as "What is in it is done" and "Those that have left".
OPENINGS = "What|Whether|Who|Those|That of|That is|Of|Where|Else|By then|As of|Without|None of which|One that|The one"
HEADLESS = re.compile(rf"({OPENINGS})\b(?! if)")
# Calls whose texts are messages, help or output for people.
SPEAKERS = re.compile(r"(Error|error|warning|info|echo|print|Option|Argument|refuse\w*|reject\w*|Finding|note|Advice)$")
SAMPLE = 60
MAX_COLUMNS = 120
# The first page is generated from docstrings, and a test reads the second one line by line.
UNWRAPPED = {Path("docs/configuration.md"), Path("tests/ABILITIES.md")}


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in listed.split("\0") if name]


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield comments, with the lines of a block joined, except directives for tools."""
    begun, last, words = 0, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type != tokenize.COMMENT or re.match(
            r"# ?(fmt:|noqa|type:|ruff:|mypy:|!|shellcheck|codespell)", token.string
        ):
            continue
        text, alone = token.string.lstrip("# "), not token.line[: token.start[1]].strip()
        if alone and token.start[0] == last + 1:
            words += " " + text
        else:
            if words:
                yield begun, words
            begun, words = token.start[0], text
        last = token.start[0] if alone else -1
    if words:
        yield begun, words


def text_of(node: ast.AST) -> str:
    """Return a string as written in the source, with the expressions of an f-string in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"
            for part in node.values
        )
    return ""


def messages(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and SPEAKERS.search(ast.unparse(node.func)):
            for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
                text = text_of(value)
                if len(text.split()) >= 4:
                    yield value.lineno, text


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a page from its paragraphs, list items and table cells, without code."""
    fenced, paragraph, begun = False, "", 0
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        starts = not line.strip() or fenced or re.match(r"\s*([-*|#>]|\d+\.|```)", line)
        if starts:
            for cell in re.split(r"(?<!\\)\|", paragraph):
                for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[])", cell.strip(" |-*#")):
                    if len(sentence.split()) >= 5 and not sentence.startswith("<"):
                        yield begun, sentence
            paragraph, begun = (
                ("" if fenced or not line.strip() or line.lstrip().startswith("```") else line.strip()),
                number,
            )
        else:
            paragraph += " " + line.strip()


def wide_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of prose above MAX_COLUMNS in a page: no code, no table, and no line that is a single link."""
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        is_free = fenced or re.match(r"\s*\||\s*([-*] )?!?\[[^]]*\]\(\S*\)[.,:;]?$", line)
        if len(line) > MAX_COLUMNS and not is_free:
            yield number, line


def check_width() -> int:
    found = [(path, *wide) for path in tracked("*.md") if path not in UNWRAPPED for wide in wide_lines(path)]
    for path, number, line in found:
        print(f"{path}:{number}: has {len(line)} columns; wrap it at {MAX_COLUMNS}")
    return int(bool(found))


def check() -> int:
    found = 0
    for path in tracked("*.py"):
        for line, text in sorted([*docstrings(path), *comments(path)]):
            if HEADLESS.match(text):
                found += 1
                print(f"{path}:{line}: begins without a noun: {text.splitlines()[0][:80]}")
    return int(found > 0)


def sample(seed: int) -> int:
    code, pages = tracked("src/*.py", "jobs/*.py", "pipelines/*.py", "examples/*.py"), tracked("*.md", ":!tests")
    generator = random.Random(seed)
    for name, read, paths in (
        ("docstrings", docstrings, code),
        ("comments", comments, code),
        ("messages", messages, code),
        ("sentences of pages", sentences, pages),
    ):
        pieces = [(path, line, text) for path in paths for line, text in read(path)]
        print(f"\n## {name}: {SAMPLE} of {len(pieces)}, seed {seed}\n")
        for number, (path, line, text) in enumerate(generator.sample(pieces, SAMPLE), start=1):
            print(f"{number}. {path}:{line}\n")
            print("\n".join(f"    {row}" for row in text.splitlines()) + "\n")
    return 0


if __name__ == "__main__":
    commands = {"check": check, "width": check_width}
    sys.exit(commands[sys.argv[1]]() if sys.argv[1] in commands else sample(int(sys.argv[2])))
